"""A model directory's files: which of them hold weights, and whether these are the weights of its architecture."""
