"""Ranks of Miles' stand-in: one in this process, some over gloo, and on a Ray that believes in GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.nemo_rl.engines import engine_over, in_process_engine
from support.nemo_rl.gloo_group import OverGloo
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel
from tinsmith_trainer.engines.megatron.model.ranked_model import ranked_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, RankGroup, agreed
from tinsmith_trainer.engines.miles.arguments import miles_arguments, sizes_of
from tinsmith_trainer.engines.miles.rank import MilesRank
from tinsmith_trainer.torch_model.loading import TorchModel
from typing_extensions import override

STAND_IN = Path(__file__).parent / "stand_in"
FAKED_PACKAGES = ("miles", "megatron.bridge")

_rank: list[MilesRank] = []
"""The ranks of the process that imports this module."""


@contextmanager
def stand_in() -> Iterator[None]:
    """Miles and Megatron-Bridge can be imported inside, and are forgotten afterwards."""
    sys.path.insert(0, str(STAND_IN))
    try:
        yield
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.startswith(FAKED_PACKAGES)]:
            del sys.modules[name]


def arguments_of(model: TorchModel, settings: MegatronSettings, parallelism: Parallelism) -> list[str]:
    ranked = ranked_model(model.directory, model.info, settings)
    return miles_arguments(ranked, sizes_of(model.directory), parallelism, nodes=1)


def one_rank_engine(settings: MegatronSettings) -> Engine:
    in_process_engine(settings).close()  # this process is the only rank of its process group then
    model, one = tiny_model(), Parallelism(distributed_optimizer=True)
    rank = MilesRank(arguments_of(model, settings, one), one, 0)
    with stand_in():
        rank.prepare()
        rank.join("127.0.0.1", 0)
    return engine_over(OneRank(rank), model, settings)


class CpuMilesRank(MilesRank):
    """A rank whose Megatron finds no GPU at a call."""

    @override
    def ts_call(self, method: str, args: tuple[Any, ...]) -> Answer:
        with cpu_megatron():
            return super().ts_call(method, args)


class OneRank(RankGroup):
    def __init__(self, rank: MilesRank) -> None:
        self._rank = rank

    @property
    @override
    def parallelism(self) -> Parallelism:
        return Parallelism(distributed_optimizer=True)

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        with cpu_megatron():
            return agreed([self._rank.ts_call(method, args)])

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        [shard] = shards
        with cpu_megatron():
            return agreed([self._rank.ts_call_on_shard(method, shard, args)])

    @override
    def close(self) -> None:
        """Do nothing: no process runs for this group."""


class GlooMilesRanks(OverGloo):
    def __init__(self, model: TorchModel, settings: MegatronSettings, parallelism: Parallelism) -> None:
        arguments = arguments_of(model, settings, parallelism)
        each = [(arguments, parallelism, rank) for rank in range(parallelism.world_size)]
        super().__init__(parallelism, _start, each, _call)


def _start(arguments: list[str], parallelism: Parallelism, rank: int) -> None:
    initialise_parallel(parallelism, rank)
    made = CpuMilesRank(arguments, parallelism, rank)
    with stand_in():
        made.prepare()
        made.join("127.0.0.1", 0)
    _rank.append(made)


def _call(method: str, args: tuple[Any, ...]) -> Answer:
    return _rank[0].ts_call(method, args)
