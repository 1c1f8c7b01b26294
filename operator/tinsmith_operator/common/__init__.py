"""Pure: what sessions and pools are decided by alike."""
