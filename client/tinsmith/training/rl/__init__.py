"""Reinforcement learning from groups of environments, above a stream of rollouts."""
