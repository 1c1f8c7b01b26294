"""Files on disk: a write is complete or has no effect, and begins only if the disk has space."""
