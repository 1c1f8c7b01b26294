"""Enforcement of NetworkPolicies in clusters of this package.

The other network programs of these clusters do not enforce NetworkPolicies.
"""
