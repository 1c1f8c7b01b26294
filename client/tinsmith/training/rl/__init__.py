"""Reinforcement learning on groups of environments. It is based on a stream of rollouts."""
