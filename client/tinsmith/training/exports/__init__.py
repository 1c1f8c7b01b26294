"""Exports of weights from a server as tensors: a LoRA adapter, or the base model with a merged adapter."""
