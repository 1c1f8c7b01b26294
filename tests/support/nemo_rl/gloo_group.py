"""A rank group over a test's gloo processes: any layout of ranks, without Ray's seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.nemo_rl.gloo import GlooRanks
from tinsmith_trainer.engines.megatron.local_rank import RankModel, build_rank
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, RankGroup, agreed, attempt
from tinsmith_trainer.engines.megatron.step.rank import Rank
from typing_extensions import override

_rank: list[Rank] = []
"""The ranks of the process that imports this module."""


Call = Callable[[str, tuple[Any, ...]], Answer]
"""A rank's method by its name, in the rank's process."""


class OverGloo(RankGroup):
    def __init__(
        self, parallelism: Parallelism, start: Callable[..., None], each: Sequence[tuple[Any, ...]], call: Call
    ) -> None:
        """`start` is run in each rank's process with its arguments of `each`."""
        self._parallelism = parallelism
        self._call = call
        self.ranks = GlooRanks(parallelism.world_size)
        self.ranks.run_each(start, each)

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._parallelism

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        return agreed(self.ranks.run(self._call, method, args))

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        layout = self._parallelism
        own = [(method, (shards[layout.coordinates(rank).data], *args)) for rank in range(layout.world_size)]
        values = agreed(self.ranks.run_each(self._call, own))
        return [values[rank] for rank in layout.reporting_ranks()]

    @override
    def close(self) -> None:
        self.ranks.close()


class GlooGroup(OverGloo):
    def __init__(self, model: RankModel) -> None:
        each = [(model, rank) for rank in range(model.parallelism.world_size)]
        super().__init__(model.parallelism, _start, each, _call)

    def fail_in_the_second_microbatch(self) -> None:
        """Make the next call that has two microbatches fail in the second."""
        self.ranks.run(_fail_once)


def _start(model: RankModel, rank: int) -> None:
    initialise_parallel(model.parallelism, rank)
    _rank.append(build_rank(model, rank))


def _call(method: str, args: tuple[Any, ...]) -> Answer:
    with cpu_megatron():
        return attempt(lambda: getattr(_rank[0], method)(*args))


def _fail_once() -> None:
    """Fail where the loss is computed, when a first microbatch's gradients are in the buffers."""
    from tinsmith_trainer.engines.megatron.model import schedule

    real = schedule.total_loss
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            schedule.total_loss = real
            raise RuntimeError("a microbatch failed, as the test wants")
        return real(*args)

    schedule.total_loss = fail
