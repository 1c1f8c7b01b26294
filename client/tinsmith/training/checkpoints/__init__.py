"""Checkpoints of a run, which are stored on disk or in an object store."""
