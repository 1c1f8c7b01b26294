"""A real server and a real worker in this process, either of which may die at any moment.

Under the worker is a journal on disk, under the server an SQLite store; between them are calls without sockets. A
killed one leaves what its disk held at that moment, and nothing that it does afterwards reaches anybody: the next one
begins on a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from support.engine.reference import ReferenceEngine
from support.protocol.lines import InProcessClient, Response, WorkerLine, post
from support.sampler.scripted_sampler import ScriptedSampler
from support.server.fake_fleet import MODELS, FakeFleet, FakeHandle
from support.server.http_server import Time, settings_for
from tinsmith_server.app import create_app
from tinsmith_server.errors import TinsmithError, WorkerUnavailable
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.services.assembly import Services
from tinsmith_server.store.store import Store, open_store
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.errors import SamplerClosed, UserError
from tinsmith_trainer.oplog.attempts import AttemptPolicy
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sequence
from tinsmith_trainer.training.snapshotting import SnapshotPolicy
from tinsmith_trainer.worker.grpc_server import WorkerServicer
from tinsmith_trainer.worker.metrics import WorkerName
from tinsmith_trainer.worker.service import WorkerParts, WorkerService
from tinsmith_trainer.worker.volume import Volume
from typing_extensions import override

Done = Callable[[SampleOutcome], None]


class HeldSampler(ScriptedSampler):
    """Called from the worker's event loop alone, since nothing here has a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, tuple[SampleJob, Done]] = {}

    @override
    def submit(self, job: SampleJob, done: Done) -> None:
        self.running[job.request_id] = job, done

    @override
    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            _, done = self.running.pop(request_id)
            done(SampleOutcome(error=UserError("The request was cancelled.")))

    def end(self, request_id: str) -> None:
        job, done = self.running.pop(request_id)
        assert job.params.seed is not None
        drawn = Sequence(np.array([job.params.seed], np.int32), np.zeros(1, np.float32), stopped=True)
        done(SampleOutcome((drawn,), prompt_tokens=len(job.prompt)))

    def sequence_memory(self) -> str:
        return ""

    @override
    def close(self) -> None:
        for _, done in self.running.values():
            done(SampleOutcome(error=SamplerClosed("The sampler was closed.")))
        self.running.clear()


Death = Literal["worker", "server", "both", "worker's clean stop"]
POLL_HOLD_SECONDS = 0.02
SNAPSHOT_EVERY = SnapshotPolicy(replay_seconds=0.001, times_snapshot_cost=1.0)
"""The first number, so that starts happen in the middle of a model's operations, too."""
UNLIMITED_ATTEMPTS = AttemptPolicy(limit=10**6)
"""Kills from outside are no sign against the operation that they hit."""


class LivingWorker(FakeHandle):
    """One worker over all its lives, and the connection of the server that lives now."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tiny-1", MODELS[0].weights)
        self._folder = folder
        self._volumes = itertools.count()
        self._volume = folder / f"volume-{next(self._volumes)}"
        self._there = asyncio.Event()
        self._activating = asyncio.Lock()
        self._is_active = False
        self._line_end: InProcessClient | None = None
        self._servicer: WorkerServicer
        self.service: WorkerService

    # ---- as the server has it

    @override
    async def open(self, epochs: Store, directory: Path) -> None:
        self._epochs = epochs
        self._connect()

    @override
    async def close(self) -> None:
        """Close the server's end of the line. The worker stays."""
        self._there.clear()
        if self._line_end is not None:
            line_end, self._line_end = self._line_end, None
            await line_end.close()

    @override
    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.001)):
                await self._there.wait()
        except TimeoutError:
            raise WorkerUnavailable("the worker is being started") from None
        line_end = self._line_end
        assert line_end is not None
        async with self._activating:
            if not self._is_active and line_end is self._line_end:
                await self._activate(line_end)
                self._is_active = True
        return line_end

    @override
    def running(self) -> GrpcWorkerClient | None:
        return self._line_end if self._is_active else None

    def _connect(self) -> None:
        self._is_active = False
        self._line_end = InProcessClient(WorkerLine(self._servicer))
        self._there.set()

    # ---- as the machine has it

    async def start(self) -> None:
        """Start on the volume."""
        parts = WorkerParts(
            engine=ReferenceEngine(),
            sampler=HeldSampler(),
            checkpoints=CheckpointRoot((self._folder / "checkpoints").as_uri()),
            volume=Volume(self._volume, reserved_bytes=0),
            policy=SNAPSHOT_EVERY,
            attempts=UNLIMITED_ATTEMPTS,
        )
        self.service = WorkerService(parts)
        self._servicer = WorkerServicer(self.service, WorkerName("tiny-1"))

    @property
    def sampler(self) -> HeldSampler:
        sampler = self.service.parts.sampler
        assert isinstance(sampler, HeldSampler)
        return sampler

    async def die(self, *, cleanly: bool = False) -> None:
        """Die and start again. The dead process may write to a volume that is no longer read."""
        await self.close()
        dead = self.service
        if not cleanly:
            copy = self._folder / f"volume-{next(self._volumes)}"
            # No commit is under way while the journal's thread copies.
            dead.journal.read(lambda _: shutil.copytree(self._volume, copy, copy_function=_copy)).result()
            self._volume = copy
        await dead.drain()
        await self.start()
        self._connect()

    async def end(self) -> None:
        await self.close()
        await self.service.drain()


class Installation:
    """Server and worker. Opened once, and used by many sequences, each with sessions of its own."""

    def __init__(self, folder: Path, template: Path) -> None:
        self._folder = folder
        self._stores = itertools.count()
        self._template = template
        self.worker = LivingWorker(folder)
        self._fleet = FakeFleet(MODELS[:2], [self.worker])
        self.time = Time()
        self._app = create_app(self._settings(template), self._fleet, self.time)
        self._requests: set[asyncio.Task[Response]] = set()
        self._store: Store
        self._store_file = template
        self.services: Services

    @classmethod
    async def opened(cls, folder: Path, template: Path) -> Installation:
        """`template`: a store's file without rows."""
        installation = cls(folder, template)
        await installation.worker.start()
        await installation._start_server()
        return installation

    def _settings(self, store_file: Path) -> Any:
        return settings_for(
            self._folder,
            poll_hold_seconds=POLL_HOLD_SECONDS,
            database_url=f"sqlite:///{store_file}",
            checkpoint_root=(self._folder / "checkpoints").as_uri(),
        )

    async def _start_server(self) -> None:
        """Start a server on a copy of the store as the last server left it, with the application's own lifespan."""
        copy = self._folder / f"store-{next(self._stores)}.db"
        await asyncio.to_thread(_copy_of_store, self._store_file, copy)
        await self._take_over(copy)

    async def _take_over(self, store_file: Path) -> None:
        self._store_file = store_file
        settings = self._settings(store_file)
        self._store = await open_store(settings.store_url)
        await self._fleet.open(self._store)
        self.services = Services(settings, self._store, self._fleet, self.time)
        self._app.state.services = self.services
        await self.services.keys.create_first()
        await self.services.binding.resume()
        await self.services.background.start()

    async def _kill_server(self) -> Path:
        """Kill the server, and return what its disk held."""
        copy = self._folder / f"store-{next(self._stores)}.db"
        await asyncio.to_thread(_copy_of_store, self._store_file, copy)
        await self.worker.close()
        for request in tuple(self._requests):
            request.cancel()
        await self._stop_server()
        return copy

    async def _stop_server(self) -> None:
        self.services.long_polls.release()
        with contextlib.suppress(TinsmithError):
            await self.services.background.stop()
        await self.services.binding.close()
        await self._store.close()

    async def kill(self, what: Death) -> None:
        match what:
            case "worker":
                await self.worker.die()
            case "worker's clean stop":
                await self.worker.die(cleanly=True)
            case "server":
                await self._take_over(await self._kill_server())
            case "both":
                store = await self._kill_server()
                await self.worker.die()
                await self.worker.close()
                await self._take_over(store)

    # ---- requests

    def begin(self, path: str, body: dict[str, Any] | bytes, key: str = "") -> asyncio.Task[Response]:
        """Begin a request that may still be under way when a process dies."""
        request = asyncio.create_task(post(self._app, path, body, key))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return request

    async def post(self, path: str, body: dict[str, Any] | bytes, key: str = "") -> Response:
        return await self.begin(path, body, key)

    async def close(self) -> None:
        await self._stop_server()
        await self.worker.end()
        self._fleet.cleanup()


def _copy(source: str, target: str) -> None:
    """Copy a folder. A file that vanishes meanwhile is one that is not needed."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)


def _copy_of_store(source: Path, target: Path) -> None:
    with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
        old.backup(new)


async def empty_store(folder: Path) -> Path:
    """Return a store with the schema and no rows, which is the most expensive part of a start."""
    template = folder / "empty.db"
    store = await open_store(f"sqlite:///{template}")
    await store.close()
    return template
