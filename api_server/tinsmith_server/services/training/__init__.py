"""Models and their training operations, on their way to a worker."""
