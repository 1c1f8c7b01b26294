"""NeMo RL's Megatron policy workers as the ranks of a model: a backend on GPUs.

Only the module `actor` imports NeMo RL at module level; Ray imports `actor`, on the ranks. Other modules import NeMo
RL, Ray and Megatron-Bridge inside functions.
"""
