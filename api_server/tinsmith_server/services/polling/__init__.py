"""Polls for operations and samples, held until there is an answer."""
