"""Who asks: API keys, and the sessions of client programs."""
