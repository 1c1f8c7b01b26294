"""Prometheus metrics of the server, and of the workers. Workers' metrics come from their last descriptions."""
