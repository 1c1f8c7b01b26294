"""What saved weights are worth: tasks, evaluations beside a loop, and sweeps over checkpoints."""
