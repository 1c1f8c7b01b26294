"""The dialects of other makers over HTTP."""
