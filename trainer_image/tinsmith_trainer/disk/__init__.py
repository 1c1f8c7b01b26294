"""Files on disk: written completely or not at all, and only if there is space."""
