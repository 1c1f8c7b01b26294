"""Files on disk, which are written completely or not at all, and only if there is space."""
