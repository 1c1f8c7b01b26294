"""Keeps one worker running: start, activate under a new epoch, watch, restart with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from tinsmith_server.errors import ModelUnloadable, StaleEpoch, TinsmithError, WorkerUnavailable
from tinsmith_server.fleet.base import EpochRegistry, WorkerClient, WorkerHandle
from tinsmith_server.fleet.process import WorkerProcess
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 30.0
# A directory that cannot be loaded is mended by a human: until then no request may cost a start.
UNLOADABLE_BACKOFF_SECONDS = 10.0
STALE_EPOCH_PAUSE_SECONDS = 0.02
# A worker that lived this long did not die of its start.
HEALTHY_SECONDS = 60.0


class Supervisor(WorkerHandle):
    """One worker's life in this server. Idle until somebody asks for its connection."""

    def __init__(
        self,
        worker_id: str,
        command: Callable[[Path, int], Sequence[str]],
        socket_directory: Path,
        socket_prefix: str,
        epochs: EpochRegistry,
    ) -> None:
        self._worker_id = worker_id
        self._command = command
        self._sockets = (socket_directory, socket_prefix)
        self._epochs = epochs
        self._running: WorkerProcess | None = None
        self._instance_id = ""
        self._reason = "the worker is starting"
        self._unloadable = False
        self._lives = itertools.count(1)
        self._start_not_before = 0.0
        # Set while there is an answer: a ready worker, or the reason why its model cannot be loaded.
        self._settled = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._renewal = asyncio.Lock()

    @property
    @override
    def worker_id(self) -> str:
        return self._worker_id

    @override
    async def connection(self, timeout_seconds: float) -> WorkerClient:
        self._see_that_it_lives()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout_seconds)
        if self._running is not None:
            return self._running.client
        raise ModelUnloadable(self._reason) if self._unloadable else WorkerUnavailable(self._reason)

    @override
    def running(self) -> WorkerClient | None:
        return self._running.client if self._running else None

    @override
    async def renew(self) -> None:
        async with self._renewal:
            if self._running is not None:
                await self._activate(self._running, self._instance_id)

    async def close(self) -> None:
        """Stops the worker, which snapshots its models first."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    def _see_that_it_lives(self) -> None:
        """Starts the first life, and another one after the model's directory was to blame."""
        over = self._life is None or self._life.done()
        if over and asyncio.get_running_loop().time() >= self._start_not_before:
            self._lost("the worker is starting", unloadable=False)
            self._life = asyncio.create_task(
                self._live(), name=f"worker {self._worker_id}", context=contextvars.Context()
            )

    async def _live(self) -> None:
        """Until the server stops, or the model's directory is to blame: then the next request tries again."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._one_life(next(self._lives))
            except OSError as error:
                self._lost(f"the worker cannot be started: {error}", unloadable=False)
                log.error("worker cannot be started", worker_id=self._worker_id, error=str(error))
            if self._unloadable:
                self._start_not_before = asyncio.get_running_loop().time() + UNLOADABLE_BACKOFF_SECONDS
                return
            if asyncio.get_running_loop().time() - started > HEALTHY_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _one_life(self, life: int) -> None:
        directory, prefix = self._sockets
        process = await WorkerProcess.start(self._command, directory / f"{prefix}-{life}.sock")
        log.info("worker started", worker_id=self._worker_id, pid=process.pid)
        try:
            self._instance_id = await process.until_serving()
            await process.unless_dead(self._activate(process, self._instance_id))
            self._ready(process)
            await process.wait()
            self._lost(process.cause_of_death(), process.model_unloadable)
        except TinsmithError as error:
            self._lost(str(error), process.model_unloadable)
        except asyncio.CancelledError:
            self._lost("the server is stopping", unloadable=False)
            await process.stop()
            raise
        log.warning("worker lost", worker_id=self._worker_id, reason=self._reason)
        await process.discard()

    def _ready(self, process: WorkerProcess) -> None:
        self._running, self._unloadable = process, False
        self._settled.set()
        log.info("worker ready", worker_id=self._worker_id, pid=process.pid)

    def _lost(self, reason: str, unloadable: bool) -> None:
        self._running, self._reason, self._unloadable = None, reason, unloadable
        if unloadable:
            self._settled.set()
        else:
            self._settled.clear()

    async def _activate(self, process: WorkerProcess, instance_id: str) -> None:
        """Gives the instance an epoch that nobody else has had."""
        while True:
            row = await self._epochs.get_worker(self._worker_id)
            if row.instance_id != instance_id:
                raised = await self._epochs.raise_epoch(self._worker_id, row.epoch, instance_id)
                if raised is None:
                    continue
                row = raised
            try:
                await process.client.activate(row.epoch)
                return
            except StaleEpoch:
                # The volume has seen a higher epoch than the store gave: take the next one.
                await self._epochs.raise_epoch(self._worker_id, row.epoch, instance_id)
                await asyncio.sleep(STALE_EPOCH_PAUSE_SECONDS)
