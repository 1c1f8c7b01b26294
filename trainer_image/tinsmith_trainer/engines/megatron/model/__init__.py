"""A rank's part of a model in Megatron's layers: base weights, LoRA, and substitutes for code that needs a GPU."""
