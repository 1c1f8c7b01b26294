"""Calls of admins for all tenants: keys, limits of tenants, and workers."""
