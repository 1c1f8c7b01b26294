"""One rank in this process, on the CPU or on a GPU: the engine without Ray."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.local_rank import RankModel, build_rank, join_process_group
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, agreed, attempt
from tinsmith_trainer.errors import ServerError

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
