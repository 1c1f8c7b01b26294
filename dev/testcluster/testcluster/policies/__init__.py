"""Enforces NetworkPolicies in this package's clusters, whose other network programs do not enforce them."""
