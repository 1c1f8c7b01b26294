"""Adapters that were made elsewhere, on their way in."""
