"""Custom losses: graphs of allowed functions that users send. The limits of their cost, and their evaluation."""
