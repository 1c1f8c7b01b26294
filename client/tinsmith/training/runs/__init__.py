"""`tinsmith train`: runs that need a file of settings and no program."""
