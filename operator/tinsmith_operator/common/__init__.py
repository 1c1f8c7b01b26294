"""Pure functions and types that the decisions about sessions and about pools share."""
