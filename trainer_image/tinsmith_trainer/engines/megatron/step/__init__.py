"""What one rank does with its part of a model, whoever built it: adapters in turn, gradients, optimizer steps, state.

Knows Megatron's optimizers and data parallelism, but neither how the model was made nor where the rank runs.
"""
