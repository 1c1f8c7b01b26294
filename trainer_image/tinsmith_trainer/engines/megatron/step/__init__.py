"""A rank's work on its part of a model: switching adapters, gradients, optimizer steps and state.

It uses Megatron's optimizers and data parallelism. It depends neither on the way the model was built nor on the place
where the rank runs.
"""
