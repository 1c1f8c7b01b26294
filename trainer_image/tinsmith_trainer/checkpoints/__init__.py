"""State on disk: Tinker checkpoints and their storage, and the snapshots from which a replay continues."""
