"""State on disk: Tinker checkpoints and where they are kept, and the snapshots that a replay goes on from."""
