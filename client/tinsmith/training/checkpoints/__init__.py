"""Checkpoints of a run, on disk or in an object store."""
