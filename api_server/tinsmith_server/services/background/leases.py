"""Leases of maintenance tasks. Each task has one owner at a time, and the replicas share the tasks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.store.connection import StoreError
from tinsmith_server.store.store import Store

T = TypeVar("T")

log = get_logger(__name__)

# If the owner of a task dies, the task gets a new owner within this time plus RENEW_SECONDS.
LEASE_SECONDS = 12.0
# Two renewals may fail before a lease is lost.
RENEW_SECONDS = 4.0
# This clock advances while the host sleeps, if the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Leases:
    """The leases of this replica. Leases are renewed independently of the tasks, so a long task keeps its lease.

    A replica that is paused loses its leases. An interrupted task does no harm: every task is idempotent, or changes a
    row only if the row is unchanged.
    """

    def __init__(self, store: Store, fleet: Fleet, replica: str = "") -> None:
        self.replica = replica or uuid.uuid4().hex
        self._store = store
        self._fleet = fleet
        self._requested: set[str] = set()
        self._held: frozenset[str] = frozenset()
        self._until = 0.0
        self._changed = asyncio.Event()
        self._renewed = asyncio.Event()

    def want(self, task: str) -> None:
        self._requested.add(task)
        self._changed.set()

    def unwant(self, task: str) -> None:
        self._requested.discard(task)
        self._changed.set()

    def holds(self, task: str) -> bool:
        return task in self._held and time.clock_gettime(_CLOCK) < self._until

    async def until_held(self, task: str) -> None:
        while not self.holds(task):
            await self._renewed.wait()

    async def keep(self) -> None:
        """Renew the leases until cancelled. If the store does not answer, the leases expire."""
        while True:
            self._changed.clear()
            try:
                await self.renew()
            except StoreError as error:
                log.warning("leases not renewed", reason=str(error))
            except Exception:
                # If this task ended, the replica would never again do its share of the work.
                log.exception("leases not renewed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._changed.wait()

    async def renew(self) -> None:
        """Renew the leases once. Announce this replica, and take its share of the tasks."""
        if self._fleet.problem is not None:
            # This replica does not know its workers, so the other replicas must not leave tasks to it.
            await self.leave()
            return
        requested_at = time.clock_gettime(_CLOCK)
        replicas = await _to_its_end(self._store.announce_replica(self.replica, LEASE_SECONDS))
        share = {task for task in self._requested if preferred(task, replicas) == self.replica}
        if surplus := self._held - share:
            self._held -= surplus
            await _to_its_end(self._store.give_up_leases(self.replica, surplus))
        held = await _to_its_end(self._store.hold_leases(self.replica, share, LEASE_SECONDS))
        self._hold(held, requested_at + LEASE_SECONDS)

    async def leave(self) -> None:
        """Give up all leases immediately, so that another replica or the next process can take them."""
        self._hold(frozenset(), 0.0)
        await self._store.leave(self.replica)

    def _hold(self, tasks: frozenset[str], until: float) -> None:
        self._held, self._until = tasks, until
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()


async def _to_its_end(transaction: Coroutine[Any, Any, T]) -> T:
    """Run the transaction to its end even if this call is cancelled, because the store would continue it anyway.

    A transaction that ends after `leave` would announce a stopped replica and take leases for it.
    """
    task = asyncio.create_task(transaction)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


def preferred(task: str, replicas: Sequence[str]) -> str:
    """Return the replica that should own a task.

    Every replica computes the same result. When a replica appears or disappears, only the tasks in its share move.
    """
    return max(replicas, key=lambda replica: hashlib.sha256(f"{replica}\0{task}".encode()).digest())
