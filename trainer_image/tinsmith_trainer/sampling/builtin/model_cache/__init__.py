"""Memory of sequences in transformers' own caches, for models whose layers keep more than keys and values."""
