"""Pure decisions about a SamplerPool. The entry point is `decision`."""
