"""The Kubernetes API: its client and how often that may write, its resources, what its watches show, and events."""
