"""Checkpoints: reported by workers, found, kept, downloaded and deleted."""
