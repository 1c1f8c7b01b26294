"""Miles' Megatron actors as the ranks of a model: a second backend on GPUs.

Miles parses arguments, joins Megatron's process groups, builds the model and the optimizer, and reads the Hugging Face
weights. `engines/megatron` does the rest. Only processes of ranks import Miles, inside functions.
"""
