"""Files on disk: written whole or not at all, and only where there is space."""
