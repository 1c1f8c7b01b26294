"""Kinds of others in a cluster, and KubeRay's operator."""
