"""Pure: what is there around a SamplerPool, to what is to be done. The entry is `decision`."""
