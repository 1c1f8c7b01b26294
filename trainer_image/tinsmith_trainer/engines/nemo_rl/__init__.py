"""NeMo RL's Megatron policy workers as the ranks of a model: the backend on GPUs.

Only `actor` imports NeMo RL where it is read, and only Ray reads it, on the ranks. Everything else imports it, Ray
and Megatron-Bridge when it is called.
"""
