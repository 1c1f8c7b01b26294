"""Miles' own actors as ranks on a CPU, in an environment that has them: `make test-miles`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RanksWanted
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.ray_ranks import RayRanks
from tinsmith_trainer.engines.miles.group import start_miles_ranks
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model


@contextmanager
def real_ranks(model: TorchModel, parallelism: Parallelism, settings: MegatronSettings) -> Iterator[RayRanks]:
    """As the worker makes them where there are GPUs, on a Ray that is told that there are."""
    wanted = RanksWanted(parallelism, in_process=False, nodes=1, gpus_per_node=parallelism.world_size, ray_address=None)
    made, _ = start_miles_ranks(RanksRequest(model.directory, model.info, wanted, settings))
    try:
        yield made
    finally:
        made.close()


def in_bfloat16(model: TorchModel, folder: Path) -> TorchModel:
    """The same model where its configuration says that it is to be computed in bfloat16; loaded here in float32."""
    copied = shutil.copytree(model.directory, folder / "bfloat16")
    config = copied / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    return load_torch_model(str(copied), dtype=torch.float32)
