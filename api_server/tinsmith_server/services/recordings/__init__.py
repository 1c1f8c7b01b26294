"""Recordings of agents: the tokens, logprobs and weights of each turn."""
