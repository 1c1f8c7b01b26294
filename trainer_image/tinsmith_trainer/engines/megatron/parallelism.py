"""The division of a model's layers, matrices and data among ranks."""

from __future__ import annotations

from dataclasses import dataclass

RANK_WAIT_SECONDS = 600.0
"""The time for which a rank on a CPU waits for other ranks before a call fails."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's index in each dimension.

    `expert` is the index of this rank among the ranks that divide a mixture's experts.
    """

    pipeline: int
    data: int
    context: int
    tensor: int
    expert: int


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The number of ranks in each dimension.

    Raises ValueError if the ranks cannot be divided in this way.

    Ranks are numbered in Megatron's order: `arange(world_size).reshape(pipeline, data, context, tensor)`. The dimension
    of experts adds no ranks: experts are divided among ranks of the other dimensions.
    """

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "tensor", "pipeline", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"The parallelism's {name} is {getattr(self, name)}; it must be at least 1.")
        if self.world_size % self._model_ranks:
            raise ValueError(
                f"A model on {self._model_ranks} ranks (tensor {self.tensor} x pipeline {self.pipeline} x context "
                f"{self.context}) does not divide {self.world_size} ranks: choose a multiple."
            )
        if (self.world_size // self.pipeline) % self.expert:
            raise ValueError(
                f"Experts cannot be divided among {self.expert} ranks: a pipeline stage has "
                f"{self.world_size // self.pipeline} ranks, which {self.expert} does not divide."
            )

    @property
    def _model_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """The number of copies of the model. Each copy computes a different part of the data."""
        return self.world_size // self._model_ranks

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, context, tensor, self._in_stage(rank) % self.expert)

    def _in_stage(self, rank: int) -> int:
        return rank % (self.world_size // self.pipeline)

    def is_first_copy(self, rank: int) -> bool:
        """Return whether this rank is the first rank that holds its dense layers."""
        at = self.coordinates(rank)
        return at.data == 0 and at.context == 0

    def is_first_of_experts(self, rank: int) -> bool:
        """Return whether this rank is the first rank that holds its experts."""
        return self._in_stage(rank) < self.expert

    def reporting_ranks(self) -> list[int]:
        """Return the number of the rank that reports results, for each data index.

        The reporting rank is in the last pipeline stage.
        """
        return [
            rank
            for rank in range(self.world_size)
            if (at := self.coordinates(rank)).pipeline == self.pipeline - 1 and at.context == 0 and at.tensor == 0
        ]
