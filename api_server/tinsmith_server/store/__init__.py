"""The store of everything that outlives a replica: one SQLite file, or PostgreSQL for several replicas."""
