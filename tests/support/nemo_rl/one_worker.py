"""Tinsmith's NeMo RL worker on the CPU: its own class, mixed into a stand-in that builds Megatron's real model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed
from support.nemo_rl.bridge import adapted_by_bridge
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model
from tinsmith_trainer.engines.megatron.model.ranked_model import RankedModel, ranked_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, agreed
from tinsmith_trainer.engines.megatron.step.optimizer import wrap_for_training
from tinsmith_trainer.engines.nemo_rl.group import WORKER
from tinsmith_trainer.engines.nemo_rl.policy_config import policy_config
from tinsmith_trainer.torch_model.tiny_model import Family
from typing_extensions import override

ONE = Parallelism()


def worker_class() -> Any:
    """Return the class that NeMo RL would find by its dotted name, without Ray's decoration."""
    module, _, name = WORKER.rpartition(".")
    actor = getattr(importlib.import_module(module), name)
    return actor.__ray_metadata__.modified_class


def built_by_nemo_rl(directory: Path, lora: Any, parallelism: Parallelism) -> Mapping[str, Any]:
    """Model and optimizer as `setup_model_and_optimizer` leaves them: DDP that ends a rank at a NaN included."""
    with cpu_megatron():
        chunk = build_megatron_model(directory, parallelism, max_rank=lora.dim).chunk
        adapted_by_bridge(chunk, lora, parallelism.tensor)
        ddp, optimizer = wrap_for_training(chunk, distributed_optimizer=parallelism.distributed_optimizer)
        ddp.ddp_config.check_for_nan_in_grad = True
    return {"model": ddp, "optimizer": optimizer}


def tiny_sizes(max_rank: int, family: Family = "qwen3") -> RankedModel:
    model = tiny_model(family)
    return ranked_model(model.directory, model.info, MegatronSettings(max_rank=max_rank, token_budget=4096))


def one_worker(model: RankedModel, parallelism: Parallelism = ONE) -> Any:
    """Build the worker in the process group of this process, which has this `parallelism`."""
    assert torch.distributed.get_world_size() == parallelism.world_size
    worker = worker_class()(
        policy_config(model, parallelism), lambda lora: built_by_nemo_rl(model.directory, lora, parallelism)
    )
    worker.rank = torch.distributed.get_rank()
    return worker


class OneWorker(RankGroup):
    """Calls it as NeMo RL's worker group would, by keyword."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.calls: list[str] = []

    @property
    @override
    def parallelism(self) -> Parallelism:
        return ONE

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        with cpu_megatron():
            return agreed([self.worker.ts_call(method=method, arguments=args)])

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        self.calls.append(method)
        [shard] = shards
        with cpu_megatron():
            return agreed([self.worker.ts_call_sharded(shard=shard, method=method, arguments=args)])

    @override
    def close(self) -> None:
        """Do nothing: no process runs for this worker."""
