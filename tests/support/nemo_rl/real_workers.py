"""NeMo RL's own Megatron workers on a CPU, in an environment that has them: `make test-nemo-rl`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from support.nemo_rl.one_worker import worker_class
from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankPlacement
from tinsmith_trainer.engines.megatron.model.ranked_model import ranked_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, agreed
from tinsmith_trainer.engines.nemo_rl import group
from tinsmith_trainer.engines.nemo_rl.conversion import ROOT_VARIABLE, converted_model
from tinsmith_trainer.engines.nemo_rl.environment import ARCHITECTURES
from tinsmith_trainer.engines.nemo_rl.group import STOCK_WORKER, VENVS_VARIABLE
from tinsmith_trainer.engines.nemo_rl.policy_config import Config, policy_config, starting_from
from tinsmith_trainer.torch_model.loading import TorchModel
from typing_extensions import override

ONE = Parallelism()
RANKS_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
RAYS_RESOURCES = "RAY_OVERRIDE_RESOURCES"
"""The resource by which a node tells Ray what it has."""


def environment_of_image(folder: Path) -> dict[str, str]:
    """Set what NeMo RL's image sets: its workers' environment, this one, and the folder of conversions."""
    venvs = folder / "venvs"
    venvs.mkdir()
    (venvs / STOCK_WORKER).symlink_to(sys.prefix)
    return {VENVS_VARIABLE: str(venvs), ROOT_VARIABLE: str(folder / "converted"), ARCHITECTURES: "9.0"}


def in_float32(config: Config) -> Config:
    """Return a worker's config with other types, so that it can be compared with other engines to seven digits."""
    megatron = config["megatron_cfg"]
    return {
        **config,
        "precision": "float32",
        "megatron_cfg": {
            **megatron,
            "pipeline_dtype": "float32",
            "optimizer": {**megatron["optimizer"], "bf16": False},
        },
    }


@contextmanager
def real_ranks(
    model: TorchModel, parallelism: Parallelism, settings: MegatronSettings, *, float32: bool = True
) -> Iterator[RankGroup]:
    """Start ranks as the worker does where there are GPUs, on a Ray that believes there are."""
    ranks = parallelism.world_size
    gpus = {RAYS_RESOURCES: json.dumps({"GPU": ranks, "CPU": ranks + 1})}
    prepare = group.prepare
    prepared = (lambda *args: _in_float32(prepare(*args))) if float32 else prepare
    wanted = RankPlacement(parallelism, in_process=False, nodes=1, gpus_per_node=ranks, ray_address=None)
    with patch.dict(os.environ, gpus), patch.object(group, "prepare", prepared):
        made = group.build_nemo_group(RanksRequest(model.directory, model.info, wanted, settings))
    try:
        yield made
    finally:
        made.close()


def _in_float32(prepared: group.Prepared) -> group.Prepared:
    return replace(prepared, config=in_float32(prepared.config))


class RealWorker(RankGroup):
    """One `MegatronPolicyWorkerImpl`, with ours mixed in, in this process and without Ray. Once a process."""

    def __init__(self, model: TorchModel, settings: MegatronSettings) -> None:
        config = policy_config(ranked_model(model.directory, model.info, settings), ONE)
        converted = converted_model(model.directory, model.info.revision, Path(sys.executable))
        self._worker = _new_rank(model.directory, in_float32(starting_from(config, converted)))
        self._worker.ts_start(parallelism=ONE)

    @property
    @override
    def parallelism(self) -> Parallelism:
        return ONE

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        return agreed([self._worker.ts_call(method=method, arguments=args)])

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        [shard] = shards
        return agreed([self._worker.ts_call_sharded(shard=shard, method=method, arguments=args)])

    @override
    def close(self) -> None:
        """Megatron's process group ends with the process."""


def _new_rank(directory: Path, config: Config) -> Any:
    """Make a rank as `Policy` and its worker group do, with the GPU that Ray assigns."""
    import ray
    from nemo_rl.distributed.named_sharding import NamedSharding
    from transformers import AutoTokenizer

    axes = [group.OTHER_AXES[0], group.DATA_AXIS, *group.OTHER_AXES[1:]]
    with patch.dict(os.environ, RANKS_ENVIRONMENT), patch.object(ray, "get_gpu_ids", lambda: [0]):
        return worker_class()(
            config,
            tokenizer=AutoTokenizer.from_pretrained(directory),
            weights_path=None,
            optimizer_path=None,
            init_optimizer=True,
            init_reference_model=False,
            worker_sharding_annotations=NamedSharding(layout=np.arange(1).reshape(1, 1, 1, 1), names=axes),
        )
