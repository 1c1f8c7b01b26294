"""Import of adapters that other programs made."""
