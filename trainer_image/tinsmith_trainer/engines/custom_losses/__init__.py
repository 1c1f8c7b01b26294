"""Losses that users bring along, as graphs of allowed functions: what each may cost, and how it is run."""
