"""`tinsmith train`: training runs that need only settings, and no program."""
