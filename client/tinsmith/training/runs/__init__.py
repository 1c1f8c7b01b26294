"""`tinsmith train`: training runs that need settings but no program."""
