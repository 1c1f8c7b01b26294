"""The nemo-rl engine on two ranks that share the data, over Ray; one of them fails alone when a file says so.

For `--engine`: `support.nemo_rl.failing_rank:build`. The file lies in the model's directory, which every rank reads,
and is gone when the rank has failed: the next life's ranks do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.megatron.batch import Batch, RowResults
from tinsmith_trainer.engines.megatron.flags import NEMO_RL
from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.worker.engine_factories import build_on_ranks
from typing_extensions import override

prepare_for_ray()  # before Ray is imported, which reads its settings then

from tinsmith_trainer.engines.megatron import cpu_actors  # noqa: E402
from tinsmith_trainer.engines.megatron.cpu_actors import RankActor  # noqa: E402
from tinsmith_trainer.engines.megatron.step.rank import Schedule  # noqa: E402
from tinsmith_trainer.engines.megatron.step.shared_calls import Loss  # noqa: E402

RANKS, FAILING_RANK = 2, 1
SWITCH = "fail-alone"


def build(options: WorkerOptions) -> tuple[Engine, Sampler | None]:
    options.engine, options.ranks = NEMO_RL, RANKS
    cpu_actors.RankActor = FailingRank  # type: ignore[misc]
    return build_on_ranks(options)


class FailingRank(RankActor):
    def join(self, address: str, port: int) -> None:
        super().join(address, port)
        if self._number == FAILING_RANK:
            self._rank._schedule = FailingSchedule(self._rank._schedule, self._model.directory / SWITCH)


class FailingSchedule(Schedule):
    """Fails when it has computed its part, and the other rank waits for it to add up gradients."""

    def __init__(self, schedule: Schedule, switch: Path) -> None:
        self._schedule = schedule
        self._switch = switch

    @override
    def __call__(
        self, microbatches: Sequence[Batch], loss: Loss, *, forward_only: bool, packed: bool = False
    ) -> list[RowResults]:
        results = self._schedule(microbatches, loss, forward_only=forward_only, packed=packed)
        if self._switch.exists():
            self._switch.unlink()
            raise RuntimeError("this rank is out of memory")
        return results
