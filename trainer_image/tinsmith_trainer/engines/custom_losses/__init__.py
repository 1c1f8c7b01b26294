"""Custom losses: graphs of allowed functions that users send.

This package limits the cost of custom losses, and evaluates custom losses.
"""
