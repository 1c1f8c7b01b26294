"""Ranks on the CPU as Ray actors, one process each, on one machine or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch._C._distributed_c10d import TCPStore
from typing_extensions import override

from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.cpu_rank import RankModel, build_cpu_rank, join_process_group
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, RankGroup, agreed, attempt
from tinsmith_trainer.engines.megatron.ranks.rank_watch import RankWatch
from tinsmith_trainer.engines.megatron.ranks.ray_answers import collect, start_error
from tinsmith_trainer.engines.megatron.ranks.ray_cluster import RayCluster
from tinsmith_trainer.errors import ServerError

MEETING_TIMEOUT = timedelta(minutes=5)

GANG_SECONDS = 600.0
"""How long all places for ranks may take to be free, nodes that are still to come included."""


def start_ray_ranks(model: RankModel, *, nodes: int, address: str | None) -> RayRanks:
    """On a cluster that runs at `address`, or a new one in this container, which ends with the ranks.

    Raises ServerError and what `RayRanks` raises.
    """
    cluster = RayCluster(address, cpus=model.parallelism.world_size)
    try:
        return RayRanks(model, nodes=nodes, at_close=cluster.close)
    except Exception:
        cluster.close()
        raise


class RayRanks(RankGroup):
    """Actors of the cluster that this process is the driver of, all of them or none."""

    def __init__(self, model: RankModel, *, nodes: int = 1, at_close: Callable[[], None] = lambda: None) -> None:
        """Raises ServerError where there is no room for all ranks, and what `build_cpu_rank` raises."""
        self._parallelism = model.parallelism
        self._at_close = at_close
        self._actors: list[Any] = []
        self._watch: RankWatch | None = None
        try:
            self._places = _reserve(model.parallelism.world_size, nodes)
            self._actors = [_actor(model, rank, self._places, nodes) for rank in range(model.parallelism.world_size)]
            address, port = ray.get(self._actors[0].host.remote())
            ray.get([actor.join.remote(address, port) for actor in self._actors])
        except RayError as error:
            self.close()
            raise start_error(error) from error
        self._watch = RankWatch(self._actors)

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._parallelism

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        shared = ray.put(args)
        return agreed(collect([actor.call.remote(method, shared) for actor in self._actors]))

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        data, shared = [ray.put(shard) for shard in shards], ray.put(args)
        calls = [
            actor.call_on_shard.remote(method, data[self._parallelism.coordinates(rank).data], shared)
            for rank, actor in enumerate(self._actors)
        ]
        values = agreed(collect(calls))
        return [values[rank] for rank in self._parallelism.speakers()]

    @override
    def close(self) -> None:
        if not self._actors:
            return
        if self._watch is not None:
            self._watch.close()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        remove_placement_group(self._places)
        self._at_close()


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


def _reserve(ranks: int, nodes: int) -> PlacementGroup:
    """A place for each rank, or none for any: half a model would wait for ever, and hold what another one needs."""
    if ranks % nodes:
        raise ServerError(f"{ranks} ranks do not divide into {nodes} nodes; give a multiple.")
    strategy = "PACK" if nodes == 1 else "STRICT_SPREAD"
    places = placement_group([{"CPU": ranks // nodes}] * nodes, strategy=strategy)
    try:
        ray.get(places.ready(), timeout=GANG_SECONDS)
    except GetTimeoutError:
        remove_placement_group(places)
        raise ServerError(
            f"Ray has no room for --ranks {ranks} on --nodes {nodes} after {GANG_SECONDS:.0f} s. Each needs a CPU; "
            f"Ray's nodes: {len(ray.nodes())}, their CPUs: {ray.cluster_resources().get('CPU', 0):.0f}."
        ) from None
    return places


def _actor(model: RankModel, rank: int, places: PlacementGroup, nodes: int) -> Any:
    """Ranks in their order fill one node after the other, so that those that talk most are neighbours."""
    place = PlacementGroupSchedulingStrategy(
        places, placement_group_bundle_index=rank * nodes // model.parallelism.world_size
    )
    return ray.remote(RankActor).options(num_cpus=1, max_restarts=0, scheduling_strategy=place).remote(model, rank)


def _store(address: str, port: int, world_size: int, **options: bool) -> TCPStore:
    """Without libuv, with which Debian's PyTorch is not built: a few ranks need no faster one."""
    return TCPStore(address, port, world_size, timeout=MEETING_TIMEOUT, use_libuv=False, **options)
