"""Stable names for saved samplers, where a server has them."""
