"""Constraints: which texts a sequence may have, and the formats of tool calls."""
