"""A second memory of sequences: transformers' own caches, for models whose layers keep more than keys and values."""
