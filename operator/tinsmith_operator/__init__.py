"""The Kubernetes operator: TrainingSessions and SamplerPools in, workloads, services, secrets and policies out."""
