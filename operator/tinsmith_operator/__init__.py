"""The Kubernetes operator, which creates workloads, Services, Secrets and policies for sessions and pools."""
