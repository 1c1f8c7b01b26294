"""A rank of Megatron's own layers, optimizer and schedules: on the CPU over gloo, or on a GPU over NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed
from torch._C._distributed_c10d import Store

from tinsmith_trainer.engines.megatron.flags import RankRecompute
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model, initialise_parallel
from tinsmith_trainer.engines.megatron.model.schedule import MegatronSchedule
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.rank import LoraPlaces, Rank
from tinsmith_trainer.engines.megatron.step.step_setup import wrap_for_training
from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep

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
    places = LoraPlaces(tuple(tensor.part() for tensor in part.lora.tensors), part.lora.set_scale)
    return Rank(step, MegatronSchedule(ddp), places, model.parallelism, rank)
