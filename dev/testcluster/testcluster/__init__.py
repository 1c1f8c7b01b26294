"""A Kubernetes cluster on this machine, for tests, the demo and experiments: `python -m testcluster up`."""
