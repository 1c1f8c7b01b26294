"""Reinforcement learning on groups of environments, based on a stream of rollouts."""
