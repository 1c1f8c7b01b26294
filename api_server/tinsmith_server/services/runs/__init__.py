"""Training runs as a user watches them: their state, and the series of their steps."""
