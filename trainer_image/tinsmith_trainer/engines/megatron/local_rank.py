"""A rank of Megatron's own layers, optimizer and schedules: on the CPU over gloo, or on a GPU over NCCL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import HashStore, Store
from typing_extensions import override

from tinsmith_trainer.engines.megatron.flags import RankRecompute
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model, initialise_parallel
from tinsmith_trainer.engines.megatron.model.schedule import MegatronSchedule
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, agreed, attempt
from tinsmith_trainer.engines.megatron.step.optimizer import wrap_for_training
from tinsmith_trainer.engines.megatron.step.rank import LoraTarget, Rank
from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep
from tinsmith_trainer.errors import ServerError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A rank that waits this long for the others fails; one that died is noticed at once."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model as each rank is told to build its part of it; picklable.

    device: where weights and batches are. A process that sees GPUs must use one.
    """

    directory: Path
    parallelism: Parallelism
    max_rank: int
    recompute: RankRecompute = "none"
    device: str = "cpu"


def join_process_group(store: Store, model: RankModel, rank: int) -> None:
    """Once a process. Returns when all ranks have come."""
    torch.distributed.init_process_group(
        BACKENDS[torch.device(model.device).type],
        store=store,
        rank=rank,
        world_size=model.parallelism.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    initialise_parallel(model.parallelism, rank)


def build_rank(model: RankModel, rank: int) -> Rank:
    """After `join_process_group`. Raises ModelDirectoryInvalid."""
    with cpu_megatron():
        part = build_megatron_model(
            model.directory,
            model.parallelism,
            max_rank=model.max_rank,
            recompute=model.recompute,
            device=model.device,
        )
        ddp, optimizer = wrap_for_training(part.chunk, distributed_optimizer=model.parallelism.distributed_optimizer)
        step = AdapterStep(ddp, optimizer, part.lora.tensors)
    places = LoraTarget(tuple(tensor.part() for tensor in part.lora.tensors), part.lora.set_scale)
    return Rank(step, MegatronSchedule(ddp), places, model.parallelism, rank)


_joining = threading.Lock()


class InProcessRank(RankGroup):
    """The rank that is all of its model.

    torch and Megatron know one process group a process: the first rank of a process joins it, later ones share
    it, and it ends with the process.
    """

    def __init__(self, model: RankModel) -> None:
        """Raises ModelDirectoryInvalid, ServerError beside a GPU, and ValueError for more ranks than one."""
        if torch.cuda.is_available() and model.device == "cpu":
            raise ServerError(
                "A rank in this process computes on the CPU, and Megatron would look for the GPU that this process "
                "sees. Give --gpus-per-node to use it, or set CUDA_VISIBLE_DEVICES to nothing."
            )
        if model.parallelism.world_size != 1:
            raise ValueError(f"One process cannot be {model.parallelism.world_size} ranks.")
        with _joining:
            if not torch.distributed.is_initialized():
                join_process_group(HashStore(), model, 0)
        self._parallelism = model.parallelism
        self._rank = build_rank(model, 0)

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._parallelism

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        with cpu_megatron():
            return agreed([attempt(lambda: getattr(self._rank, method)(*args))])

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        [shard] = shards
        return self.all(method, shard, *args)

    @override
    def close(self) -> None:
        """Nothing runs beside this process."""
