"""Reinforcement learning on groups of environments. Training consumes a stream of rollouts."""
