"""Training: runs of accepted operations on the engine, with durable results."""
