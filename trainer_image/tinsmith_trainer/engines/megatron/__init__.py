"""A model on many ranks by Megatron. The engines `nemo-rl` and `miles` share this package, which depends on neither.

Ranks run in this process, as Ray actors on CPUs, or as Ray actors on GPUs with the code of one of the two engines.
"""
