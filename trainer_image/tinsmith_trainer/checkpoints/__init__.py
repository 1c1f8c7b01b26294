"""State on disk: Tinker checkpoints, their storage, and the snapshots from which a replay continues."""
