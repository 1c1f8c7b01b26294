"""The rules of a sequence's draws: grammars, biases and penalties, as changes of the logits."""
