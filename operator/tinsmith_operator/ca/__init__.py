"""The certificate authority of an installation, and what it issues."""
