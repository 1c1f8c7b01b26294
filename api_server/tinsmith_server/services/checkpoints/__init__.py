"""Checkpoints: workers report them, and the services find, keep, send and delete them."""
