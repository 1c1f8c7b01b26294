"""Decode steps on a device: launched ahead of their results, and recorded so that one call launches all kernels."""
