"""Pure decisions about a SamplerPool. The entry is `decision`."""
