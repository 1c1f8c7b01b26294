"""The Kubernetes operator: TrainingSession resources in, workloads, services, secrets and policies out."""
