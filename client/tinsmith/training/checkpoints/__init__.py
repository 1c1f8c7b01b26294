"""Directories of a run, one per step, from which it goes on."""
