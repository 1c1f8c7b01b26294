"""How many processes divide a model among themselves, and where they are."""

from __future__ import annotations

from tinsmith_operator.model.base import Resource

GPU = "nvidia.com/gpu"
"""The resource that a session asks for to train on GPUs with engine nemo-rl: whole ones."""


class Parallelism(Resource):
    """nodes: pods. The others count the ranks that share matrices, layers, sequences and experts."""

    nodes: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


ALONE = Parallelism()
"""Of a session that does not say how its model is divided."""
