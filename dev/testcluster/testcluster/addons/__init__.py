"""CRDs of other projects, and the operator of KubeRay."""
