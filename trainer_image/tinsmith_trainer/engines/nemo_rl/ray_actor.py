"""A rank on the CPU as a Ray actor: a process of its own, on this machine or another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from tinsmith_trainer.engines.nemo_rl.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.nemo_rl.cpu_rank import RankModel, build_cpu_rank, join_process_group
from tinsmith_trainer.engines.nemo_rl.groups import Answer, attempt

MEETING_TIMEOUT = timedelta(minutes=5)


class RankActor:
    """Built in steps, because the first rank must know its port before the others can come to it."""

    def __init__(self, model: RankModel, rank: int) -> None:
        self._model = model
        self._number = rank
        # Ranks on one machine share its cores, and a sum must not depend on how many there are.
        torch.set_num_threads(1)

    def host(self) -> tuple[str, int]:
        """Of the first rank: opens the store at which all meet, and tells where. The system chooses the port."""
        address = ray.util.get_node_ip_address()
        world_size = self._model.parallelism.world_size
        self._store = _store(address, 0, world_size, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def join(self, address: str, port: int) -> None:
        """Returns when all ranks have come and the model is built. Raises ModelDirectoryInvalid."""
        world_size = self._model.parallelism.world_size
        store = self._store if self._number == 0 else _store(address, port, world_size)
        join_process_group(store, self._model.parallelism, self._number)
        self._rank = build_cpu_rank(self._model, self._number)

    def call(self, method: str, args: tuple[Any, ...]) -> Answer:
        """`Rank`'s method of that name."""
        with cpu_megatron():
            return attempt(lambda: getattr(self._rank, method)(*args))

    def call_on_shard(self, method: str, shard: Any, args: tuple[Any, ...]) -> Answer:
        return self.call(method, (shard, *args))


def _store(address: str, port: int, world_size: int, **options: bool) -> TCPStore:
    """Without libuv, with which Debian's PyTorch is not built: a few ranks need no faster one."""
    return TCPStore(address, port, world_size, timeout=MEETING_TIMEOUT, use_libuv=False, **options)
