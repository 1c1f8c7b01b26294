"""The work of a rank on a part of a model: switching adapters, gradients, optimizer steps and state.

This package uses Megatron's optimizers and data parallelism. The code does not depend on how the model was built or
where the rank runs.
"""
