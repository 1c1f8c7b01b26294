"""Tinker's requests and responses, as this server reads and writes them."""
