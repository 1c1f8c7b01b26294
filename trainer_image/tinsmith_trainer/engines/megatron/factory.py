"""The start of ranks and of the engine: CPU ranks of this package, or GPU ranks of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from tinsmith_trainer.engines.export import BaseFiles
from tinsmith_trainer.engines.megatron.engine import MegatronEngine
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankPlacement
from tinsmith_trainer.engines.megatron.parallelism import RANK_WAIT_SECONDS
from tinsmith_trainer.engines.megatron.rank_group import RankGroup
from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RanksRequest:
    """A model and the requested ranks. `directory` has the same path on every node.

    `wait_seconds` is the time for which a rank on a CPU waits for other ranks before a call fails.
    """

    directory: Path
    info: BaseModelInfo
    placement: RankPlacement
    settings: MegatronSettings
    wait_seconds: float = RANK_WAIT_SECONDS


GpuRanks = Callable[[RanksRequest], tuple[RankGroup, torch.dtype]]
"""A function that starts ranks on GPUs, and returns the ranks and the dtype of the base weights.

Raises ModelDirectoryInvalid, and ServerError if the ranks cannot start.
"""


def build_megatron_engine(name: str, request: RanksRequest, gpu_ranks: GpuRanks) -> MegatronEngine:
    """Return the engine after all ranks have loaded their part of the model.

    `name` is the engine's value of `--engine`.

    Raises ModelDirectoryInvalid, and ServerError if the ranks cannot start.
    """
    placement = request.placement
    log.info("starting ranks", engine=name, **placement.described())
    started = time.monotonic()
    ranks, dtype = _start_ranks(request, gpu_ranks)
    log.info("ranks ready", ranks=placement.parallelism.world_size, seconds=round(time.monotonic() - started, 1))
    files = BaseFiles(request.directory, request.info.path, dtype)
    return MegatronEngine(name, ranks, files, request.info, request.settings)


def _start_ranks(request: RanksRequest, gpu_ranks: GpuRanks) -> tuple[RankGroup, torch.dtype]:
    """Start the ranks.

    Only the framework of the requested kind of ranks is imported, because an image holds only one framework.
    """
    placement, settings = request.placement, request.settings
    if not placement.in_process:
        prepare_for_ray()
    if placement.gpus_per_node:
        return gpu_ranks(request)
    from tinsmith_trainer.engines.megatron.local_rank import RankModel

    model = RankModel(
        request.directory,
        placement.parallelism,
        settings.max_rank,
        settings.recompute,
        wait_seconds=request.wait_seconds,
    )
    if placement.in_process:
        from tinsmith_trainer.engines.megatron.local_rank import InProcessRank

        return InProcessRank(model), torch.float32
    from tinsmith_trainer.engines.megatron.cpu_actors import start_cpu_ranks

    return start_cpu_ranks(model, nodes=placement.nodes, address=placement.ray_address), torch.float32
