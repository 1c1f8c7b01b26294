"""The process of a worker or a sampler: the gRPC server and service, start and end, TLS, health and volume."""
