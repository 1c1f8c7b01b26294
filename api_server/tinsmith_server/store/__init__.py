"""Everything that must outlive a replica: one SQLite file, or PostgreSQL for many replicas."""
