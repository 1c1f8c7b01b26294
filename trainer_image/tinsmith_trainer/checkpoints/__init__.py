"""State on disk: Tinker checkpoints, the storage of checkpoints, and the snapshots from which a replay continues."""
