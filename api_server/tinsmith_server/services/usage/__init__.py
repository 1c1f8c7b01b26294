"""Usage: collection from workers, storage, and reports for tenants."""
