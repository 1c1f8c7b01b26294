"""Pure: typed input to whole Kubernetes objects."""
