"""Pure: what decisions about sessions and about pools share."""
