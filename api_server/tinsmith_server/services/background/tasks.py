"""Background tasks. Each maintenance task runs at the replica that holds its lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from tinsmith_server.errors import TinsmithError, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.services.background.inspection import Inspection
from tinsmith_server.services.background.leases import Leases
from tinsmith_server.services.background.reaper import LostWorkers, Reaper
from tinsmith_server.services.checkpoints.retention import KeptCheckpoints, Retention
from tinsmith_server.services.checkpoints.worker_events import Events
from tinsmith_server.services.training.adapter_imports import AdapterImports
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.submission import Submission
from tinsmith_server.services.usage.collection import UsageCollection
from tinsmith_server.store.connection import StoreError
from tinsmith_server.store.store import Store

log = get_logger(__name__)

INSPECT_SECONDS = 5.0
REAP_SECONDS = 15.0
RELEASE_SECONDS = 15.0
SWEEP_SECONDS = 60.0
COLLECT_SECONDS = 5.0
TAKE_UP_SECONDS = 15.0
DELIVER_SECONDS = 2.0
WRITE_OFF_SECONDS = 60.0
FOLLOW_SECONDS = 10.0

USAGE = "usage"
"""The name of the task that collects usage from workers."""

MaintenanceTask = Callable[[], Awaitable[None]]


class Background:
    """The background tasks of a server."""

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        leases: Leases,
        sessions: Sessions,
        binding: Binding,
        events: Events,
        submission: Submission,
        reaper: Reaper,
        lost_workers: LostWorkers,
        retention: Retention,
        kept_checkpoints: KeptCheckpoints,
        imports: AdapterImports,
        inspection: Inspection,
        usage: UsageCollection,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._leases = leases
        self._sessions = sessions
        self._binding = binding
        self._events = events
        self._submission = submission
        self._reaper = reaper
        self._lost_workers = lost_workers
        self._retention = retention
        self._kept_checkpoints = kept_checkpoints
        self._imports = imports
        self._inspection = inspection
        self._usage = usage
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the tasks. Returns when the reaper has begun to measure how long clients are silent."""
        await self._reaper.listen()
        tasks = [
            self._leases.keep(),
            self._every(INSPECT_SECONDS, self._inspection.refresh),
            self._by_one(REAP_SECONDS, "reaper", self._reaper.reap),
            self._by_one(RELEASE_SECONDS, "releaser", self._release),
            self._by_one(SWEEP_SECONDS, "sweeper", self._sweep),
            self._by_one(COLLECT_SECONDS, USAGE, self._usage.collect),
            self._by_one(TAKE_UP_SECONDS, "binder", self._binding.resume),
            self._by_one(DELIVER_SECONDS, "deliverer", self._submission.deliver_all),
            self._by_one(WRITE_OFF_SECONDS, "writer-off", self._lost_workers.write_off),
            self._release_finished_here(),
            self._follow_workers(),
        ]
        self._tasks = [asyncio.create_task(task) for task in tasks]

    async def stop(self) -> None:
        """Stop the tasks, and give up the leases immediately."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._usage.close(take=self._leases.holds(USAGE))
            await self._leases.leave()

    # ---- Each method is one round. After a change of the lease's owner, a round may run twice.

    async def reap_now(self) -> None:
        """End silent sessions, and release their models."""
        await self._reaper.reap()
        await self._release()

    async def sweep_now(self) -> None:
        """Remove expired data."""
        await self._sweep()

    async def collect_now(self) -> None:
        """Store the usage that workers have counted."""
        await self._usage.collect()

    async def write_off_now(self) -> None:
        """End the models of permanently lost workers."""
        await self._lost_workers.write_off()

    async def _sweep(self) -> None:
        await self._kept_checkpoints.sweep()
        await self._retention.sweep()
        await self._imports.sweep()
        await self._reaper.delete_expired_recordings()
        await self._usage.sweep()
        await self._store.fold_series()
        await self._sessions.sweep()
        await self._store.delete_expired_replicas()

    async def _release(self) -> None:
        await self._reaper.release()
        await self._reaper.evacuate()

    async def _release_finished_here(self) -> None:
        """Release the models of sessions that end at this server.

        The owner of the lease would release these models later, in its next round.
        """
        while True:
            await self._sessions.finished.wait()
            self._sessions.finished.clear()
            await self._guarded(self._reaper.release)

    async def _follow_workers(self) -> None:
        """Run one task for each worker of the fleet."""
        following: dict[str, asyncio.Task[None]] = {}

        async def until_changed() -> None:
            seen = self._fleet.changes.count
            present = {worker.worker_id for worker in self._fleet.workers}
            for worker_id in following.keys() - present:
                following.pop(worker_id).cancel()
            for worker_id in present - following.keys():
                following[worker_id] = asyncio.create_task(self._follow(worker_id))
            await self._fleet.changes.beyond(seen)

        try:
            while True:
                await self._guarded(until_changed)
        finally:
            for task in following.values():
                task.cancel()
            await asyncio.gather(*following.values(), return_exceptions=True)

    async def _follow(self, worker_id: str) -> None:
        """Apply the worker's events while the worker runs. Start the worker if a model is bound to it.

        A worker that is suspended because it was idle keeps its events until it wakes.
        """
        await self._guarded(lambda: self._wake(worker_id))
        async with self._share(f"events of {worker_id}") as held:
            while True:
                await held()
                await self._guarded(lambda: self._follow_on(worker_id))

    async def _follow_on(self, worker_id: str) -> None:
        if self._runs(worker_id):
            await self._events.follow(worker_id, FOLLOW_SECONDS)
        else:
            await asyncio.sleep(1)

    def _runs(self, worker_id: str) -> bool:
        # The handle is looked up each time, because a worker that disappears and returns has a new handle.
        return any(worker.worker_id == worker_id and worker.running() for worker in self._fleet.workers)

    async def _wake(self, worker_id: str) -> None:
        sleeps = any(worker.worker_id == worker_id and worker.asleep for worker in self._fleet.workers)
        if not sleeps and await self._store.models_of_worker(worker_id, ["accepted", "bound"]):
            await self._events.drain(worker_id)

    async def _every(self, seconds: float, task: MaintenanceTask) -> None:
        while True:
            await self._guarded(task)
            await asyncio.sleep(seconds)

    async def _by_one(self, seconds: float, name: str, task: MaintenanceTask) -> None:
        """Run rounds while this replica holds the lease. The first round starts immediately."""
        async with self._share(name) as held:
            while True:
                await held()
                await self._guarded(task)
                await asyncio.sleep(seconds)

    @contextlib.asynccontextmanager
    async def _share(self, name: str) -> AsyncIterator[MaintenanceTask]:
        """Request the lease of a task while the context is open. Yield a task that waits for the lease."""
        self._leases.want(name)
        try:
            yield lambda: self._leases.until_held(name)
        finally:
            self._leases.unwant(name)

    @staticmethod
    async def _guarded(task: MaintenanceTask) -> None:
        """Run the task. An error is logged, and the next round tries again."""
        try:
            await task()
        except WorkerUnavailable:
            await asyncio.sleep(1)
        except TinsmithError as error:
            log.warning("maintenance task failed", reason=str(error))
            await asyncio.sleep(1)
        except Exception:
            log.exception("maintenance task failed")
            await asyncio.sleep(1)
