"""Prometheus metrics of the server, and of the workers from their last descriptions."""
