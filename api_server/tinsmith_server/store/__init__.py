"""The store of all data that outlives a replica: one SQLite file, or PostgreSQL for several replicas."""
