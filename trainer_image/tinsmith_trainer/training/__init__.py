"""Runs accepted operations on the engine, one after the other, and makes their results durable."""
