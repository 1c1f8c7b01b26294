"""Where workers live, and how to speak to them."""
