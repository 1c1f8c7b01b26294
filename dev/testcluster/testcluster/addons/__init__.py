"""Custom resource definitions of other projects, and KubeRay's operator."""
