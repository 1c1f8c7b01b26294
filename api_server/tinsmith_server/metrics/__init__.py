"""Prometheus metrics of the server, and of the workers.

The metrics of workers come from the workers' last descriptions.
"""
