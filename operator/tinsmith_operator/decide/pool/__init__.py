"""What differs where the owner is a SamplerPool."""
