"""What runs beside requests: each chore in its own task, one replica at a time where a lease says so."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable

from tinsmith_server.errors import TinsmithError, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.clock import Clock, utc_now
from tinsmith_server.services.events import Events
from tinsmith_server.services.inspection import Inspection
from tinsmith_server.services.reaper import Reaper
from tinsmith_server.services.retention import Retention
from tinsmith_server.services.sessions import Sessions
from tinsmith_server.store.base import Store

log = get_logger(__name__)

LOOK_SECONDS = 5.0
REAP_SECONDS = 15.0
SWEEP_SECONDS = 60.0
FOLLOW_SECONDS = 10.0
LEASE_SECONDS = 90.0


class Background:
    """Started with the server, cancelled with it."""

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        sessions: Sessions,
        events: Events,
        reaper: Reaper,
        retention: Retention,
        inspection: Inspection,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._events = events
        self._reaper = reaper
        self._retention = retention
        self._inspection = inspection
        self._clock = clock
        self._replica = uuid.uuid4().hex
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        chores = [
            self._every(LOOK_SECONDS, self._inspection.look),
            self._every(REAP_SECONDS, self._reap),
            self._every(SWEEP_SECONDS, self._sweep),
            self._release_finished(),
            *(self._follow(worker.worker_id) for worker in self._fleet.workers),
        ]
        self._tasks = [asyncio.create_task(chore) for chore in chores]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reap_now(self) -> None:
        """One round of everything that ends sessions and frees what they held."""
        await self._reap()
        await self._release()

    async def sweep_now(self) -> None:
        """One round of removing what is past its time."""
        await self._sweep()

    async def _reap(self) -> None:
        if await self._holds("reaper"):
            await self._reaper.reap()

    async def _sweep(self) -> None:
        if await self._holds("sweeper"):
            await self._retention.sweep()

    async def _release_finished(self) -> None:
        """At once when a session ends here, and each round for those that ended elsewhere."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sessions.finished.wait(), REAP_SECONDS)
            self._sessions.finished.clear()
            await self._guarded(self._release)

    async def _release(self) -> None:
        if await self._holds("releaser"):
            await self._reaper.release()

    async def _follow(self, worker_id: str) -> None:
        """While the worker runs. A model that lives there may have work or news, so that wakes the worker."""
        await self._guarded(lambda: self._wake(worker_id))
        while True:
            if self._fleet.worker(worker_id).running() is None or not await self._holds_quietly(worker_id):
                await asyncio.sleep(1)
                continue
            await self._guarded(lambda: self._events.follow(worker_id, FOLLOW_SECONDS))

    async def _wake(self, worker_id: str) -> None:
        if await self._store.models_of_worker(worker_id, ["accepted", "bound"]):
            await self._events.drain(worker_id)

    async def _holds_quietly(self, worker_id: str) -> bool:
        try:
            return await self._holds(f"events of {worker_id}")
        except TinsmithError:
            return False

    async def _holds(self, chore: str) -> bool:
        return await self._store.take_lease(chore, self._replica, self._clock(), LEASE_SECONDS)

    async def _every(self, seconds: float, chore: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._guarded(chore)
            await asyncio.sleep(seconds)

    @staticmethod
    async def _guarded(chore: Callable[[], Awaitable[None]]) -> None:
        """A chore that fails is tried again next round; the others go on."""
        try:
            await chore()
        except WorkerUnavailable:
            await asyncio.sleep(1)
        except Exception:
            log.exception("background chore failed")
            await asyncio.sleep(1)
