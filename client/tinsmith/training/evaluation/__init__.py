"""Evaluations of saved weights: tasks, evaluations during training, and sweeps over checkpoints."""
