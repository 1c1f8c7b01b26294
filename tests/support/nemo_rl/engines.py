"""nemo-rl engines under the contract: one rank in this process, and ranks as Ray actors."""

from __future__ import annotations

import atexit
import functools
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.export import BaseFiles
from tinsmith_trainer.engines.megatron.engine import MegatronEngine
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.local_rank import InProcessRank, RankModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup
from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.tiny_model import Family
from typing_extensions import override


def in_process_engine(settings: MegatronSettings, family: Family = "qwen3", device: str = "cpu") -> MegatronEngine:
    model = tiny_model(family)
    ranked = RankModel(model.directory, Parallelism(), settings.max_rank, device=device)
    return engine_over(InProcessRank(ranked), model, settings)


def engine_over(ranks: RankGroup, model: TorchModel, settings: MegatronSettings) -> MegatronEngine:
    return MegatronEngine(
        "nemo-rl", ranks, BaseFiles(model.directory, model.info.path, torch.float32), model.info, settings
    )


def over_ray_engine(settings: MegatronSettings) -> MegatronEngine:
    """Build an engine on ranks that all engines share until `close_shared_ranks`: actors take many seconds to start."""
    model = tiny_model()
    return engine_over(AsIfNew(_two_actors(settings.max_rank)), model, settings)


@functools.cache
def _two_actors(max_rank: int) -> RankGroup:
    prepare_for_ray()
    from tinsmith_trainer.engines.megatron.cpu_actors import start_cpu_ranks

    ranks = start_cpu_ranks(RankModel(tiny_model().directory, Parallelism(2), max_rank), nodes=1, address=None)
    _closing.callback(_two_actors.cache_clear)
    _closing.callback(ranks.close)
    atexit.register(close_shared_ranks)  # behind Ray's own, and so before it
    return ranks


_closing = ExitStack()
close_shared_ranks = _closing.close


class AsIfNew(RankGroup):
    """Ranks without the adapters of those who had them before: each user's adapters have names of their own."""

    _users = itertools.count()
    _ABOUT_NO_ADAPTER = ("ts_parts",)

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._prefix = f"{next(self._users)}/"

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._ranks.parallelism

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        if method in self._ABOUT_NO_ADAPTER:
            return self._ranks.all(method, *args)
        adapter_id, *rest = args
        return self._ranks.all(method, self._prefix + adapter_id, *rest)

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        calls, *rest = args
        own = [replace(call, adapter_id=self._prefix + call.adapter_id) for call in calls]
        return self._ranks.sharded(method, shards, own, *rest)

    @override
    def close(self) -> None: ...
