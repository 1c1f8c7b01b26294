"""Models and their training operations, before they reach a worker."""
