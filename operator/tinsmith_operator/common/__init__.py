"""Pure functions and types for the decisions about both sessions and pools."""
