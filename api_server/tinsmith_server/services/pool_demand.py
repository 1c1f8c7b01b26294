"""The demand for the pools of samplers, from which an autoscaler decides on the numbers of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import NotFound, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet, SamplerHandle, ScaledPool
from tinsmith_server.store.records import Clock

DESCRIBE_SECONDS = 3.0
IN_USE_SECONDS = 60.0
"""The time after its last use for which a pool counts as used. An autoscaler asks every 15 to 30 s."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The load of a pool.

    - `unfinished_samples`, `tokens_per_second`: the sums over the replicas. Samples that run count, too.
    - `oldest_sample_seconds`: the age of the oldest unfinished sample of all replicas.
    """

    unfinished_samples: float = 0.0
    oldest_sample_seconds: float = 0.0
    tokens_per_second: float = 0.0


class PoolDemand:
    """The demand for pools. The replicas are asked at each question, so every API server gives the same answer."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._closed = False

    async def load(self, namespace: str, name: str) -> PoolLoad:
        """Return the load of a pool.

        Raises NotFound, and WorkerUnavailable if a ready replica does not answer. The sum of the others would be too
        low, and the autoscaler would remove replicas.
        """
        return load_of(await _descriptions(self._pool(namespace, name)))

    async def is_active(self, namespace: str, name: str) -> bool:
        """Return whether the pool needs a replica: a client waits for it, or has used it a short time ago.

        Raises the errors of `load`.
        """
        pool = self._pool(namespace, name)
        return is_wanted(pool.wanted_at, self._clock()) or is_in_use(await _descriptions(pool))

    async def wants(self, namespace: str, name: str) -> AsyncIterator[None]:
        """Yield at once whenever a client has begun to wait for the pool, until `close` is called.

        Raises NotFound, also when the pool disappears.
        """
        seen: datetime | None = None
        while not self._closed:
            count = self._fleet.changes.count
            wanted_at = self._pool(namespace, name).wanted_at
            if wanted_at != seen and is_wanted(wanted_at, self._clock()):
                yield
            seen = wanted_at
            await self._fleet.changes.beyond(count)

    def check(self, namespace: str, name: str) -> None:
        """Raise the error if the pool has no demand: NotFound, or WorkerUnavailable."""
        self._pool(namespace, name)

    def close(self) -> None:
        """End all `wants`."""
        self._closed = True
        self._fleet.changes.note()

    def _pool(self, namespace: str, name: str) -> ScaledPool:
        pool = self._fleet.scaled_pool(namespace, name)
        if pool is not None:
            return pool
        if self._fleet.problem is not None:
            raise WorkerUnavailable(self._fleet.problem)
        raise NotFound(
            f"SamplerPool {namespace}/{name} does not exist, is being deleted, is past its deadline, or is in a "
            "namespace that this server does not watch (fleet_namespaces)"
        )


def load_of(descriptions: Sequence[worker_pb2.DescribeReply]) -> PoolLoad:
    """Return the load of a pool from the descriptions of its replicas."""
    metrics = [one.metrics for one in descriptions]
    return PoolLoad(
        unfinished_samples=float(sum(one.samples_active + one.samples_waiting for one in metrics)),
        oldest_sample_seconds=max((one.oldest_sample_seconds for one in metrics), default=0.0),
        tokens_per_second=sum(one.sampled_tokens_per_second for one in metrics),
    )


def is_in_use(descriptions: Sequence[worker_pb2.DescribeReply]) -> bool:
    """Return whether a client uses a replica, or has used one a short time ago. A start counts as a use."""
    return any(one.idle_seconds < IN_USE_SECONDS for one in descriptions)


def is_wanted(wanted_at: datetime | None, now: datetime) -> bool:
    """Return whether a client has waited for the pool a short time ago."""
    return wanted_at is not None and now - wanted_at < timedelta(seconds=IN_USE_SECONDS)


async def _descriptions(pool: ScaledPool) -> list[worker_pb2.DescribeReply]:
    return list(await asyncio.gather(*(_describe(pool, sampler) for sampler in pool.samplers)))


async def _describe(pool: ScaledPool, sampler: SamplerHandle) -> worker_pb2.DescribeReply:
    try:
        async with asyncio.timeout(DESCRIBE_SECONDS):
            return await (await sampler.connection(DESCRIBE_SECONDS)).describe()
    except TimeoutError:
        raise WorkerUnavailable(
            f"replica {sampler.name} of {pool.title} has not answered for {DESCRIBE_SECONDS:g} s"
        ) from None
