"""The collection of usage from workers and samplers. Usage is collected in rounds, so that requests write no usage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import WorkerError
from tinsmith_server.fleet.base import Fleet, SamplerHandle, describable_handles
from tinsmith_server.store.records import Clock, Usage, UsageKind, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import session_of

# A worker that hangs must not delay the others' usage.
TAKE_SECONDS = 4.0
# The interval of measuring stored bytes, and the longest absence of all servers that counts as one interval.
STORAGE_SECONDS = timedelta(minutes=5)
LONGEST_STORAGE = timedelta(days=1)
RETENTION = timedelta(days=90)
"""The time for which usage and audit entries are kept."""

_KINDS: Mapping[worker_pb2.UsageKind.ValueType, UsageKind] = {
    worker_pb2.TRAINING_TOKENS: "training",
    worker_pb2.PREFILLED_TOKENS: "prefill",
    worker_pb2.CACHED_PREFILL_TOKENS: "cached_prefill",
    worker_pb2.SAMPLED_TOKENS: "sample",
}


class UsageCollection:
    """The task that collects usage. A worker reports each number once.

    If the store does not accept the numbers, this server keeps the numbers, and collects no more until the store
    accepts them. If the server is killed, only the numbers that the store has not accepted are lost.
    """

    def __init__(self, store: Store, fleet: Fleet, clock: Clock = utc_now) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        # The amounts by the row without its amount.
        self._unwritten: Counter[Usage] = Counter()
        self._one_at_a_time = asyncio.Lock()
        self._round: asyncio.Task[None] | None = None

    async def collect(self) -> None:
        """Run one round. The round continues even if the caller is cancelled."""
        self._round = asyncio.create_task(self._collect(take=True))
        await asyncio.shield(self._round)

    async def close(self, *, take: bool) -> None:
        """Run the last round. If `take` is False, another server collects the workers' numbers."""
        await self._collect(take=take)

    async def sweep(self) -> None:
        """Measure the stored bytes, and delete expired usage and audit entries."""
        now = self._clock()
        await self._store.add_storage_usage(now, STORAGE_SECONDS, LONGEST_STORAGE)
        await self._store.delete_old_accounts(now - RETENTION)

    async def _collect(self, *, take: bool) -> None:
        async with self._one_at_a_time:
            await self._write()
            if take:
                await self._take_all()
                await self._write()

    async def _take_all(self) -> None:
        handles = describable_handles(self._fleet)
        for handle, reply in zip(handles, await asyncio.gather(*map(_take, handles)), strict=True):
            # A worker with a newer image may count kinds that this server does not know.
            for one in (one for one in reply.usage if one.kind in _KINDS):
                self._unwritten[await self._row(handle.base_model, one)] += one.amount

    async def _row(self, base_model: str, used: worker_pb2.Usage) -> Usage:
        session_id, hour = session_of(used.used_by), datetime.fromtimestamp(used.hour, UTC)
        tenant = used.tenant
        if not tenant and (session := await self._store.get_session(session_id)) is not None:
            tenant = session.tenant  # the worker's number does not name the tenant
        return Usage(tenant, session_id, base_model, hour, _KINDS[used.kind], 0)

    async def _write(self) -> None:
        if self._unwritten:
            await self._store.add_usage([replace(row, amount=amount) for row, amount in self._unwritten.items()])
            self._unwritten.clear()


async def _take(handle: SamplerHandle) -> worker_pb2.TakeUsageReply:
    """Return the numbers of the worker. Return no numbers if the worker does not answer, or does not count usage."""
    worker = handle.running()
    if worker is None:
        return worker_pb2.TakeUsageReply()
    try:
        async with asyncio.timeout(TAKE_SECONDS):
            return await worker.take_usage()
    except (WorkerError, TimeoutError):
        return worker_pb2.TakeUsageReply()
