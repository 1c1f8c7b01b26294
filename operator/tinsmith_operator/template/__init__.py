"""Pure decisions about a SessionTemplate. The entry point is `decision`."""
