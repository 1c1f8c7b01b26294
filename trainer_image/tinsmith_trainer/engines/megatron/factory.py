"""An engine on ranks that it starts: on CPUs those of this package, on GPUs those of the engine that asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from tinsmith_trainer.engines.export import BaseFiles
from tinsmith_trainer.engines.megatron.engine import MegatronEngine
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RanksWanted
from tinsmith_trainer.engines.megatron.rank_group import RankGroup
from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RanksRequest:
    """A model and its ranks. `directory` is at the same path on every node."""

    directory: Path
    info: BaseModelInfo
    wanted: RanksWanted
    settings: MegatronSettings


GpuRanks = Callable[[RanksRequest], tuple[RankGroup, torch.dtype]]
"""Starts ranks on GPUs; also the type that they hold base weights in.

Raises ModelDirectoryInvalid, and ServerError where they cannot be had.
"""


def build_megatron_engine(name: str, request: RanksRequest, gpu_ranks: GpuRanks) -> MegatronEngine:
    """Returns when all ranks hold their part of the model. `name`: as `--engine` says it.

    Raises ModelDirectoryInvalid, and ServerError where ranks cannot be had.
    """
    wanted = request.wanted
    log.info("starting ranks", engine=name, **wanted.described())
    started = time.monotonic()
    ranks, dtype = _start_ranks(request, gpu_ranks)
    log.info("ranks ready", ranks=wanted.parallelism.world_size, seconds=round(time.monotonic() - started, 1))
    files = BaseFiles(request.directory, request.info.path, dtype)
    return MegatronEngine(name, ranks, files, request.info, request.settings)


def _start_ranks(request: RanksRequest, gpu_ranks: GpuRanks) -> tuple[RankGroup, torch.dtype]:
    """Each kind's frameworks are imported where it is asked for: an image holds one of them."""
    wanted, settings = request.wanted, request.settings
    if not wanted.in_process:
        prepare_for_ray()
    if wanted.gpus_per_node:
        return gpu_ranks(request)
    from tinsmith_trainer.engines.megatron.local_rank import RankModel

    model = RankModel(request.directory, wanted.parallelism, settings.max_rank, settings.recompute)
    if wanted.in_process:
        from tinsmith_trainer.engines.megatron.local_rank import InProcessRank

        return InProcessRank(model), torch.float32
    from tinsmith_trainer.engines.megatron.cpu_actors import start_cpu_ranks

    return start_cpu_ranks(model, nodes=wanted.nodes, address=wanted.ray_address), torch.float32
