"""The parts of a cluster of our own: control plane, nodes, network, DNS, ingress, storage."""
