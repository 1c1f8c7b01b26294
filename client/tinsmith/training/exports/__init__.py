"""Exports of a server's weights as tensors: a LoRA adapter, or the base model with the adapter merged in."""
