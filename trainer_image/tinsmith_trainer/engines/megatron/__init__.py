"""A model on many ranks by Megatron, shared by the engines `nemo-rl` and `miles`, and independent of both.

Ranks run in this process, as Ray actors on CPUs, or on GPUs with the code of one of the two engines.
"""
