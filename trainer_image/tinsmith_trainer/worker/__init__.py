"""The process around it: gRPC server and service, start and end, TLS, health, volume."""
