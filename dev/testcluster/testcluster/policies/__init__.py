"""Enforces NetworkPolicies in a cluster of our own, whose other network programs know none."""
