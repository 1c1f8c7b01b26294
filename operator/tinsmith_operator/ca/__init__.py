"""The certificate authority of an installation, and the certificates that it issues."""
