"""A rank's work on its part of a model: switching adapters, gradients, optimizer steps and state.

It uses Megatron's optimizers and data parallelism, but depends neither on how the model was built nor on where the rank
runs.
"""
