"""Pure functions and types that the decisions about sessions and pools share."""
