"""One rank's part of a model on Megatron's own layers: base weights, LoRA, and what Megatron needs without a GPU."""
