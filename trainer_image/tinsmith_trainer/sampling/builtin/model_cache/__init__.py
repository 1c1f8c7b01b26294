"""The memory of sequences in transformers' own caches, for models whose states are not only keys and values."""
