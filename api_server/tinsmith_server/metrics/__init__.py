"""Prometheus metrics of the server, and of the workers as it last saw them."""
