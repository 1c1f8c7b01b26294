"""Training: it runs accepted operations on the engine, and makes their results durable."""
