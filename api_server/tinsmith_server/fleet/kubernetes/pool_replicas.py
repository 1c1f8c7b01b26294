"""The replicas of every pool, put together from SamplerPools and their endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from typing_extensions import override

from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.base import SamplerHandle, SamplerKind
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.kubernetes.connector import ConnectedHandle, Connector, unreachable
from tinsmith_server.fleet.kubernetes.sampler_pool import Endpoint, Pool, Slice, endpoints_of
from tinsmith_server.fleet.kubernetes.watching import Key

TargetOf = Callable[[Endpoint], str]


class PoolReplica(ConnectedHandle, SamplerHandle):
    """Connected to for as long as its pod is listed, also while it terminates: it may still have results."""

    def __init__(self, pool: Pool, endpoint: Endpoint, tls: TlsDirectory, target_of: TargetOf) -> None:
        self.pool = pool
        self.endpoint = endpoint
        self.architecture: str | None = None
        self._target_of = target_of
        self._takes_saves = False  # until it has said so: one of an earlier release refuses what it does not know
        self._connector = Connector(self.name, pool.uid, tls, self._target, self._greet)

    @property
    @override
    def sampler_id(self) -> str:
        return self.endpoint.pod_uid

    @property
    @override
    def name(self) -> str:
        return f"{self.pool.namespace}/{self.endpoint.pod_name}"

    @property
    @override
    def base_model(self) -> str:
        return self.pool.model

    @property
    @override
    def kind(self) -> SamplerKind:
        return "pool"

    @property
    @override
    def accepting(self) -> bool:
        return self.endpoint.at_work and not self.pool.deleted and self._connector.client is not None

    @property
    @override
    def takes_saves_in(self) -> str | None:
        return self.pool.namespace if self._takes_saves else None

    @property
    def may_answer(self) -> bool:
        """Not one that cannot be reached, and that its node has given up, too: it would be waited for until its pod
        is gone, which on a lost node is never."""
        return self.endpoint.at_work or self._connector.client is not None

    def update(self, pool: Pool, endpoint: Endpoint) -> None:
        """What the cluster says of it now."""
        if (pool, endpoint) != (self.pool, self.endpoint):
            self.pool, self.endpoint = pool, endpoint
            self._connector.note_change()

    @override
    def _why_not(self) -> WorkerUnavailable:
        what = f"replica {self.endpoint.pod_name} of {self.pool.title}"
        if self.endpoint.serving:
            return unreachable(what, self._connector.failure)
        return WorkerUnavailable(f"{what} does not answer just now")

    def _target(self) -> str:
        return self._target_of(self.endpoint)

    async def _greet(self, client: GrpcWorkerClient) -> None:
        description = await client.describe()
        self.architecture = description.base_model.architecture or None
        self._takes_saves = description.streams_saves


PoolEndpoint: TypeAlias = tuple[Pool, Endpoint]


class Pools:
    """A replica is a pod, known by its UID, from the moment it has an address until it is no longer listed."""

    def __init__(self, tls: TlsDirectory, target_of: TargetOf, let_go: Callable[[PoolReplica], None]) -> None:
        """`let_go` closes a replica that is gone."""
        self._tls = tls
        self._target_of = target_of
        self._let_go = let_go
        self._pools: Mapping[Key, Pool] = {}
        self._replicas: dict[str, PoolReplica] = {}

    @property
    def replicas(self) -> Sequence[PoolReplica]:
        return list(self._replicas.values())

    @property
    def pools(self) -> Sequence[Pool]:
        """Those that are not being deleted."""
        return [pool for pool in self._pools.values() if not pool.deleted]

    def take(self, pools: Mapping[Key, Pool], slices: Iterable[Slice]) -> None:
        """The picture has changed."""
        self._pools = pools
        present = dict(self._parts(tuple(slices)))
        for pod_uid, known in list(self._replicas.items()):
            # One of another pool shows another certificate: its connection must be made anew.
            if pod_uid not in present or present[pod_uid][0].uid != known.pool.uid:
                self._let_go(self._replicas.pop(pod_uid))
        for pod_uid, (pool, endpoint) in present.items():
            if pod_uid in self._replicas:
                self._replicas[pod_uid].update(pool, endpoint)
            else:
                self._replicas[pod_uid] = PoolReplica(pool, endpoint, self._tls, self._target_of)

    def replicas_for(self, base_model: str, rank: int) -> Sequence[PoolReplica]:
        """Those that take new samples from adapters of this rank."""
        suiting = (one for one in self._replicas.values() if one.base_model == base_model)
        return [one for one in suiting if one.accepting and rank <= one.pool.max_rank]

    def why_none(self, base_model: str, rank: int) -> str | None:
        """What is in the way of samples from a pool; None when no pool is meant for them."""
        own = [pool for pool in self.pools if pool.model == base_model and rank <= pool.max_rank]
        # One that has replicas is worth more waiting than one that a human has scaled to none.
        best = max(own, key=lambda pool: pool.replicas > 0, default=None)
        return best.why_not_sampling() if best is not None else None

    def _parts(self, slices: Sequence[Slice]) -> Iterator[tuple[str, PoolEndpoint]]:
        for key in {one.pool for one in slices}:
            pool = self._pools.get(key)
            for pod_uid, endpoint in endpoints_of(slices, key).items():
                known = self._replicas.get(pod_uid)
                if pool is not None and (known is None or known.pool.uid == pool.uid or not _stays(known, endpoint)):
                    yield pod_uid, (pool, endpoint)
                elif known is not None:
                    # The pool is gone, and its pods are on their way out: their results are still asked for.
                    yield pod_uid, (replace(known.pool, deleted=True), endpoint)


def _stays(known: PoolReplica, endpoint: Endpoint) -> bool:
    """Whether it is of the pool that it was taken for, and not of its successor of the same name.

    A successor's pod can be seen before its pool is. What is connected has shown whose it is, and what
    terminates is the old pool's.
    """
    return endpoint.terminating or known.running() is not None
