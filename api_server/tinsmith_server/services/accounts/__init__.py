"""API keys, sessions of client programs, quotas and rates of tenants."""
