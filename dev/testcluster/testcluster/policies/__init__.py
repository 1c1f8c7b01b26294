"""Enforcement of NetworkPolicies in clusters of this package. Their other network programs do not enforce them."""
