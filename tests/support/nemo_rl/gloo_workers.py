"""Tinsmith's NeMo RL workers as a rank group over a test's gloo processes, called as NeMo RL calls its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from support.nemo_rl.fakes import fake_modules
from support.nemo_rl.gloo import GlooRanks
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel
from tinsmith_trainer.engines.megatron.model.ranked_model import RankedModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, RankGroup, agreed
from typing_extensions import override

_worker: list[Any] = []
"""The ranks of the process that imports this module."""


class GlooWorkers(RankGroup):
    def __init__(self, model: RankedModel, parallelism: Parallelism) -> None:
        self._parallelism = parallelism
        self._ranks = GlooRanks(parallelism.world_size)
        self._ranks.run_each(_start, [(model, parallelism, rank) for rank in range(parallelism.world_size)])

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._parallelism

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        return agreed(self._ranks.run(_call, "ts_call", {"method": method, "arguments": args}))

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        layout = self._parallelism
        given = [
            {"shard": shards[layout.coordinates(rank).data], "method": method, "arguments": args}
            for rank in range(layout.world_size)
        ]
        values = agreed(self._ranks.run_each(_call, [("ts_call_sharded", own) for own in given]))
        return [values[rank] for rank in layout.reporting_ranks()]

    @override
    def close(self) -> None:
        self._ranks.close()


def _start(model: RankedModel, parallelism: Parallelism, rank: int) -> None:
    sys.modules.update(fake_modules())
    from support.nemo_rl.one_worker import one_worker

    initialise_parallel(parallelism, rank)
    worker = one_worker(model, parallelism)
    with cpu_megatron():
        worker.ts_start(parallelism=parallelism)
    _worker.append(worker)


def _call(method: str, arguments: dict[str, Any]) -> Answer:
    with cpu_megatron():
        answer: Answer = getattr(_worker[0], method)(**arguments)
    return answer
