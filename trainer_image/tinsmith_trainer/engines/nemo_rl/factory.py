"""The nemo-rl engine on ranks that it starts."""

from __future__ import annotations

import time
from pathlib import Path

import structlog
import torch

from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.engines.export import BaseFiles
from tinsmith_trainer.engines.nemo_rl.engine import NemoRlEngine
from tinsmith_trainer.engines.nemo_rl.flags import NemoRlSettings, RanksWanted
from tinsmith_trainer.engines.nemo_rl.rank_group import RankGroup
from tinsmith_trainer.engines.nemo_rl.ranks.ray_cluster import prepare_for_ray

log = structlog.get_logger(__name__)


def build_nemo_rl_engine(
    directory: Path, info: BaseModelInfo, wanted: RanksWanted, settings: NemoRlSettings
) -> NemoRlEngine:
    """Returns when all ranks hold their part of the model. `directory` is at the same path on every node.

    Raises ModelDirectoryInvalid, and ServerError where ranks cannot be had.
    """
    dtype = torch.bfloat16 if wanted.gpus_per_node else torch.float32
    log.info("starting ranks", **wanted.described())
    started = time.monotonic()
    ranks = _start_ranks(directory, info, wanted, settings)
    log.info("ranks ready", ranks=wanted.parallelism.world_size, seconds=round(time.monotonic() - started, 1))
    return NemoRlEngine(ranks, BaseFiles(directory, info.path, dtype), info, settings)


def _start_ranks(directory: Path, info: BaseModelInfo, wanted: RanksWanted, settings: NemoRlSettings) -> RankGroup:
    """Each kind's frameworks are imported where it is asked for: an image holds one of them."""
    if not wanted.in_process:
        prepare_for_ray()
    if wanted.gpus_per_node:
        from tinsmith_trainer.engines.nemo_rl.nemo.group import build_nemo_group

        return build_nemo_group(
            directory,
            info,
            wanted.parallelism,
            settings,
            nodes=wanted.nodes,
            gpus_per_node=wanted.gpus_per_node,
            ray_address=wanted.ray_address,
        )
    from tinsmith_trainer.engines.nemo_rl.megatron.cpu_rank import RankModel

    model = RankModel(directory, wanted.parallelism, settings.max_rank, settings.recompute)
    if wanted.in_process:
        from tinsmith_trainer.engines.nemo_rl.ranks.in_process import InProcessRank

        return InProcessRank(model)
    from tinsmith_trainer.engines.nemo_rl.ranks.ray_ranks import start_ray_ranks

    return start_ray_ranks(model, nodes=wanted.nodes, address=wanted.ray_address)
