"""The miles engine as a worker starts it on two GPUs, which Ray believes in, on Miles' stand-in.

For `--engine`: `support.miles.on_ray:build`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from support.miles.ranks import STAND_IN
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.worker.engine_factories import build_on_ranks

prepare_for_ray()  # before Ray is imported, which reads its settings then

RANKS = 2
RAYS_RESOURCES = "RAY_OVERRIDE_RESOURCES"
"""The resource by which a node tells Ray what it has."""


def build(options: WorkerOptions) -> tuple[Engine, Sampler | None]:
    from support.miles.ranks import CpuMilesRank
    from tinsmith_trainer.engines.miles import group

    stands: Any = group
    stands.MilesRank = CpuMilesRank
    os.environ[RAYS_RESOURCES] = json.dumps({"GPU": RANKS, "CPU": RANKS})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    options.engine, options.gpus_per_node, options.tensor_parallel = "miles", RANKS, RANKS
    return build_on_ranks(options)
