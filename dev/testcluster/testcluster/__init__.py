"""A Kubernetes on this machine, for tests, the demo and trying things: `python -m testcluster up`."""
