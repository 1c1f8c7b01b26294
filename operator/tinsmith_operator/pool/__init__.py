"""Pure: decides about a SamplerPool, from what is observed of it. The entry is `decision`."""
