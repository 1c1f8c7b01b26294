"""The process of a worker or a sampler: its gRPC server and service, its start and end, TLS, health and volume."""
