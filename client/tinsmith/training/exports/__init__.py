"""Weights that a server keeps, as tensors here: a LoRA adapter, or the base model with it merged in."""
