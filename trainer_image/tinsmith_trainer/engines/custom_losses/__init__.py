"""Losses of users, as graphs of allowed functions: their cost limits, and their evaluation."""
