"""Pure functions that build complete Kubernetes objects from typed values."""
