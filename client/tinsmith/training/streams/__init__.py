"""Training on minibatches while rollouts still arrive."""
