"""`tinsmith train`: training runs that need only settings, not a program."""
