"""The Kubernetes API: its client, its resources, what its watches show, and events."""
