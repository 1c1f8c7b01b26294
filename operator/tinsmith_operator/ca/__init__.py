"""The certificate authority of an installation, and the certificates that the authority issues."""
