"""Pure functions from typed input to whole Kubernetes objects."""
