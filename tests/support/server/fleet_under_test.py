"""A fleet with one worker, whatever kind of fleet it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.server.http_server import API_KEY, TestedServer, running_server
from tinsmith_server.fleet.base import Fleet, SamplerKind, WorkerHandle
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store

START_SECONDS = 30.0


@dataclass
class Installation:
    """A fleet that serves MODEL by one worker. `kill` ends the worker's process; it comes back by itself."""

    fleet: Fleet
    store: Store
    kill: Callable[[], Awaitable[None]]
    cure_of_absence: str

    def worker(self) -> WorkerHandle:
        (worker,) = self.fleet.workers
        return worker


def worker_pid() -> int:
    """Return the id of the one worker process that this test has started."""
    (pid,) = worker_pids()
    return pid


def worker_pids() -> list[int]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"fake_worker_program" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@dataclass
class SamplingInstallation:
    """A fleet that samples from MODEL in one place. `settings` and `make_fleet` are of servers over it.

    `crash` ends the place's process, which comes back by itself; `kind` is what the place is.
    """

    kind: SamplerKind
    settings: Settings
    make_fleet: Callable[[], Fleet]
    crash: Callable[[], Awaitable[None]]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[TestedServer]:
        """One API server. Its polls are held for a moment only."""
        settings = Settings(**{**self.settings.model_dump(), "api_key": API_KEY, "poll_hold_seconds": 0.5})
        async with running_server(settings, self.make_fleet()) as server:
            yield server


async def until_present(fleet: Fleet, count: int = 1) -> None:
    """Wait until the fleet knows this many workers."""
    while len(fleet.workers) != count:
        await asyncio.wait_for(fleet.changes.beyond(fleet.changes.count), START_SECONDS)
