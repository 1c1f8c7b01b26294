"""Ranks on CPUs as Ray actors: Megatron over gloo, one process per rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tinsmith_trainer.process import gc_pause

# The first import in the process of a rank.
with gc_pause():
    import ray
    import torch
    from torch._C._distributed_c10d import TCPStore
    from typing_extensions import override

    from tinsmith_trainer.engines.megatron.local_rank import RankModel, build_rank, join_process_group
    from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
    from tinsmith_trainer.engines.megatron.rank_group import Answer
    from tinsmith_trainer.engines.megatron.ray_cluster import RayCluster
    from tinsmith_trainer.engines.megatron.ray_ranks import (
        ON_CPUS,
        RankPlacement,
        RankProcess,
        RayRanks,
        start_ranks_on,
    )

MEETING_TIMEOUT = timedelta(minutes=5)


def start_cpu_ranks(model: RankModel, *, nodes: int, address: str | None) -> RayRanks:
    """Start ranks on the Ray cluster at `address`, or on a new cluster in this container that ends with the ranks.

    Raises ServerError, and the errors of `build_rank`.
    """
    cluster = RayCluster(address, cpus=model.parallelism.world_size)
    return start_ranks_on(
        model.parallelism,
        nodes,
        ON_CPUS,
        lambda places: _start(model, places),
        at_close=cluster.close,
        late_seconds=model.wait_seconds,
    )


def _start(model: RankModel, places: RankPlacement) -> None:
    for rank in range(model.parallelism.world_size):
        places.start(RankActor, model, rank)
    places.meet()


class RankActor(RankProcess):
    def __init__(self, model: RankModel, rank: int) -> None:
        self._model = model
        self._number = rank

    @override
    def prepare(self) -> None:
        """Use one thread: ranks on a machine share the cores, and sums must not depend on the number of threads."""
        torch.set_num_threads(1)

    @override
    def host(self) -> tuple[str, int]:
        """Open the store for the rendezvous, on a port that the system chooses."""
        address = ray.util.get_node_ip_address()
        world_size = self._model.parallelism.world_size
        self._store = _store(address, 0, world_size, is_master=True, wait_for_workers=False)
        return address, self._store.port

    @override
    def join(self, address: str, port: int) -> None:
        """Join the process group and build the model. Raises ModelDirectoryInvalid."""
        world_size = self._model.parallelism.world_size
        store = self._store if self._number == 0 else _store(address, port, world_size)
        join_process_group(store, self._model, self._number)
        self._rank = build_rank(self._model, self._number)

    @override
    def ts_call(self, method: str, args: tuple[Any, ...]) -> Answer:
        with cpu_megatron():
            return super().ts_call(method, args)


def _store(address: str, port: int, world_size: int, **options: bool) -> TCPStore:
    """Return a store without libuv. PyTorch of Debian has no libuv, and a small number of ranks does not need libuv."""
    return TCPStore(address, port, world_size, timeout=MEETING_TIMEOUT, use_libuv=False, **options)
