"""A rank with Megatron's own layers, optimizer and schedules, and a group with a single rank in this process."""

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
from tinsmith_trainer.engines.megatron.parallelism import RANK_WAIT_SECONDS, Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, agreed, attempt
from tinsmith_trainer.engines.megatron.step.optimizer import wrap_for_training
from tinsmith_trainer.engines.megatron.step.rank import LoraTarget, Rank
from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep
from tinsmith_trainer.engines.megatron.step.unembedding import defer_unembedding
from tinsmith_trainer.errors import ServerError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class RankModel:
    """A picklable description from which each rank builds one part of a model.

    `device` is the device of weights and batches. A process that can see GPUs must use a GPU. `wait_seconds` is the
    time for which a rank waits for other ranks before a call fails. The death of a rank is noticed immediately, but a
    stopped rank is noticed only by this limit.
    """

    directory: Path
    parallelism: Parallelism
    max_rank: int
    recompute: RankRecompute = "none"
    device: str = "cpu"
    wait_seconds: float = RANK_WAIT_SECONDS


def join_process_group(store: Store, model: RankModel, rank: int) -> None:
    """Join the process group, once per process. Returns when all ranks have joined."""
    torch.distributed.init_process_group(
        BACKENDS[torch.device(model.device).type],
        store=store,
        rank=rank,
        world_size=model.parallelism.world_size,
        timeout=timedelta(seconds=model.wait_seconds),
    )
    initialise_parallel(model.parallelism, rank)


def build_rank(model: RankModel, rank: int) -> Rank:
    """Build a rank. Call this after `join_process_group`. Raises ModelDirectoryInvalid."""
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
    lora = part.lora
    places = LoraTarget(tuple(tensor.part() for tensor in lora.tensors), lora.set_scale, lora.route)
    return Rank(step, MegatronSchedule(ddp, defer_unembedding(ddp)), places, model.parallelism, rank)


_joining = threading.Lock()


class InProcessRank(RankGroup):
    """A group of one rank that holds the whole model.

    torch and Megatron have one process group per process. The first rank in a process creates the process group, later
    ranks use the same group, and the group ends with the process.
    """

    def __init__(self, model: RankModel) -> None:
        """Build the rank.

        Raises ModelDirectoryInvalid, ServerError if a GPU is visible, and ValueError for several ranks.
        """
        if torch.cuda.is_available() and model.device == "cpu":
            raise ServerError(
                "A rank in this process uses the CPU, but Megatron would use the GPU that this process sees. Give "
                "--gpus-per-node to use the GPU, or set CUDA_VISIBLE_DEVICES to an empty value."
            )
        if model.parallelism.world_size != 1:
            raise ValueError(f"One process cannot hold {model.parallelism.world_size} ranks.")
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
        """Do nothing, because the group has no other process."""
