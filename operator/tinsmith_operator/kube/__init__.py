"""The Kubernetes API: a client with a rate limit, the kinds of resources, a cache of the watches, and Events."""
