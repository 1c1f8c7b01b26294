"""The process of a worker or a sampler: its gRPC server and service, start and end, TLS, health, volume."""
