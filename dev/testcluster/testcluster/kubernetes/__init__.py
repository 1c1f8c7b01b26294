"""The parts of the project's own cluster: control plane, nodes, network, DNS, ingress and storage."""
