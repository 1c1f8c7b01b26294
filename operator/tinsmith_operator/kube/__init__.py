"""The Kubernetes API: its client with its rate limit, its resources, a cache of its watches, and Events."""
