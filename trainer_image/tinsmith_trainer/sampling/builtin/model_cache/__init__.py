"""The memory of sequences in transformers' own caches, for models with other states than keys and values."""
