"""NeMo RL's Megatron policy workers as the ranks of a model: a backend on GPUs.

Only `actor` imports NeMo RL at module level, and only Ray imports `actor`, on the ranks. Other modules import NeMo RL,
Ray and Megatron-Bridge inside functions.
"""
