"""Usage: it is collected from workers, stored, and reported to its tenant."""
