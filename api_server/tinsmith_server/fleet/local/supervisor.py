"""A supervisor of one process.

The supervisor starts, prepares and watches the process, and restarts the process with back-off. Each start of a worker
gets a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.errors import TinsmithError, WorkerUnavailable, WorkerUnstartable
from tinsmith_server.fleet.activation import ActivatedHandle
from tinsmith_server.fleet.base import SamplerHandle, SamplerKind, places_of
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.local.process import WorkerProcess
from tinsmith_server.logs import get_logger

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store

log = get_logger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 30.0
# After a start that needs a person's fix, no request causes another start sooner.
MENDING_BACKOFF_SECONDS = 10.0
# The exit of a process that ran this long is not a failed start.
HEALTHY_SECONDS = 60.0
# A process that answers late is not asked again at once.
SHORTEST_CHECK_SECONDS = 0.1
# The interval of progress messages while a model is being loaded.
WORD_EACH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits after which a process is stopped: without a client, and with one operation that does not end."""

    suspend_after_seconds: float | None = None
    hang_timeout_seconds: float = math.inf


class ProcessSupervisor:
    """The supervisor of one process. The first request for a connection starts the process.

    A process that no client uses for `suspend_after_seconds` is stopped. The next request starts it again. A process
    that does not answer, or whose operation takes longer than `hang_timeout_seconds`, is ended and started again.
    """

    def __init__(
        self,
        name: str,
        base_model: str,
        command: Callable[[Path, int], Sequence[str]],
        sockets: Path,
        *,
        role: str,
        device: Mapping[str, str],
        limits: ProcessLimits,
    ) -> None:
        """Prepare the process.

        Each start uses a new socket with a path that begins with `sockets`. `role` names the process in messages.
        `device` determines some variables in the environment of the process.
        """
        self._called = name
        self._base_model = base_model
        self._command = command
        self._sockets = sockets
        self._role = role
        self._device = device
        self._limits = limits
        self._is_asleep = False
        # This event is set by each request for a connection.
        self._wanted = asyncio.Event()
        self._running: WorkerProcess | None = None
        self._lost_for: str | None = None
        self._loading_since = 0.0
        self._needs_mending = False
        self._lives = itertools.count(1)
        self._start_not_before = 0.0
        # This event is set while the process is ready, or needs a person's fix.
        self._settled = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @property
    def base_model(self) -> str:
        return self._base_model

    @property
    def device(self) -> Mapping[str, str]:
        return self._device

    @property
    def _task(self) -> str:
        """A description of the work before the process is ready, for messages."""
        return f"loading base model {self._base_model}"

    @property
    def _subject(self) -> str:
        """The name of the service that the process offers, for messages."""
        return self._base_model

    async def _until_it_may_start(self) -> None:
        """Wait until the process may start. The supervisor calls this method before each start."""

    async def _greet(self, process: WorkerProcess) -> None:
        """Prepare the process. The supervisor calls this method after the first answer of the process."""

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the process is not ready, or None if the process is ready. Waiting clients see this text."""
        if self._running is not None:
            return self._silence(self._running)
        seconds = asyncio.get_running_loop().time() - self._loading_since
        loading = f"{self._task}, {seconds:.0f} s so far"
        if self._lost_for is None:
            return loading
        return self._lost_for if self._needs_mending else f"{self._lost_for}; {loading}"

    async def preload(self, on_progress: Callable[[str], None]) -> None:
        """Start the process before the first request, and call `on_progress` with its progress.

        Returns when the process is ready, or when a person must correct something. If a person must correct something,
        the first request starts the process again.
        """
        started = asyncio.get_running_loop().time()
        on_progress(self._task)
        while True:
            try:
                await self.connection(WORD_EACH_SECONDS)
            except WorkerUnstartable as error:
                on_progress(f"{self._subject} cannot be served: {error}")
                return
            except WorkerUnavailable as error:
                on_progress(str(error))
            else:
                seconds = asyncio.get_running_loop().time() - started
                on_progress(f"{self._subject} is ready after {seconds:.0f} s")
                return

    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        """Return a client of the ready process. The first call starts the process.

        Raises WorkerUnavailable with the reason if the process is not ready before the timeout. Raises
        WorkerUnstartable immediately if the model directory or the flags are the cause.
        """
        if (ready := self.running()) is not None:
            return ready
        self._see_that_it_lives()
        self.want()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                # The process can end before a waiting task runs.
                while self.running() is None and not self._needs_mending:
                    await self._settled.wait()
        if (ready := self.running()) is not None:
            return ready
        reason = self.unavailable_reason or ""
        raise WorkerUnstartable(reason) if self._needs_mending else WorkerUnavailable(reason)

    def running(self) -> GrpcWorkerClient | None:
        """Return a client if the process is ready now, and answers. This call does not start the process."""
        answers = self._running is not None and not self._running.missed_checks
        return self._running.client if self._running is not None and answers else None

    def want(self) -> None:
        """Start the process again if it is suspended because it was idle."""
        self._wanted.set()

    @property
    def asleep(self) -> bool:
        """True if the process is suspended because it was idle."""
        return self._is_asleep

    @property
    def outlives_connections(self) -> bool:
        """Return False. The process ends with this server, and each start begins without samples."""
        return False

    async def loaded(self) -> None:
        """Return when the process is ready, or when a person must correct something.

        If the process is not starting, return immediately.
        """
        if self._life is not None and not self._life.done():
            await self._settled.wait()

    async def close(self) -> None:
        """Stop the process. A worker first takes snapshots of its models."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    def _see_that_it_lives(self) -> None:
        """Start the process for the first time, and again after a person has corrected something."""
        over = self._life is None or self._life.done()
        if over and asyncio.get_running_loop().time() >= self._start_not_before:
            self._lost(None, needs_mending=False)
            self._loading_since = asyncio.get_running_loop().time()
            self._life = asyncio.create_task(
                self._live(), name=f"{self._role} {self._called}", context=contextvars.Context()
            )

    async def _live(self) -> None:
        """Restart the process until the server stops, or until a person must correct something.

        After the correction, the next request starts the process again.
        """
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            started = self._loading_since = asyncio.get_running_loop().time()
            try:
                await self._one_life(next(self._lives))
            except OSError as error:
                self._lost(f"the {self._role} cannot be started: {error}", needs_mending=False)
                log.error(f"{self._role} cannot be started", worker_id=self._called, error=str(error))
            if self._is_asleep:
                await self._wanted.wait()
                self._is_asleep, backoff = False, FIRST_BACKOFF_SECONDS
                continue
            if self._needs_mending:
                self._start_not_before = asyncio.get_running_loop().time() + MENDING_BACKOFF_SECONDS
                return
            if asyncio.get_running_loop().time() - started > HEALTHY_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _one_life(self, life: int) -> None:
        await self._until_it_may_start()
        process = await WorkerProcess.start(self._command, Path(f"{self._sockets}-{life}.sock"), self._device)
        log.info(f"{self._role} started", worker_id=self._called, pid=process.pid)
        try:
            await process.until_serving()
            await process.unless_dead(_first_of(self._serve(process), self._until_hung(process)))
            self._fall_asleep(process)
        except TinsmithError as error:
            self._lost(str(error), process.needs_mending)
        except asyncio.CancelledError:
            self._lost("the server is stopping", needs_mending=False)
            await process.stop()
            raise
        if self._is_asleep:
            await _to_the_end(process.stop())
            return
        log.warning(f"{self._role} lost", worker_id=self._called, reason=self._lost_for)
        await process.discard()

    async def _serve(self, process: WorkerProcess) -> None:
        """Offer the process to callers, and return when it is idle."""
        await self._greet(process)
        self._ready(process)
        await self._until_idle(process)

    def _ready(self, process: WorkerProcess) -> None:
        self._running, self._needs_mending = process, False
        self._settled.set()
        seconds = round(asyncio.get_running_loop().time() - self._loading_since, 1)
        log.info(f"{self._role} ready", worker_id=self._called, pid=process.pid, seconds=seconds)

    async def _until_idle(self, process: WorkerProcess) -> None:
        """Return when no client has used the process for `suspend_after_seconds`. Without this limit, never return."""
        limit_seconds = self._limits.suspend_after_seconds
        if limit_seconds is None:
            await asyncio.Event().wait()
            return
        idle_seconds = 0.0
        while idle_seconds < limit_seconds:
            await asyncio.sleep(max(limit_seconds - idle_seconds, SHORTEST_CHECK_SECONDS))
            try:
                idle_seconds = (await process.client.describe()).idle_seconds
            except TinsmithError:
                idle_seconds = 0.0  # it is too busy to answer

    async def _until_hung(self, process: WorkerProcess) -> None:
        """Check the process. While the process does not answer, callers wait and get the reason. Raises WorkerHung."""
        was_silent = False

        def note() -> None:
            nonlocal was_silent
            is_silent = process.missed_checks > 0
            if is_silent != was_silent:
                state = f"{self._role} does not answer" if is_silent else f"{self._role} answers again"
                log.warning(state, worker_id=self._called, pid=process.pid)
            was_silent = is_silent
            if is_silent:
                self._settled.clear()
            elif self._running is process:
                self._settled.set()

        await process.until_hung(self._limits.hang_timeout_seconds, note)

    def _silence(self, process: WorkerProcess) -> str | None:
        """Return that the process does not answer, for waiting clients, or None if it answers."""
        if not process.missed_checks:
            return None
        limit_seconds = process.silence_limit_seconds
        return (
            f"the {self._role} of {self._base_model} has not answered for {process.silent_seconds:g} s: it is "
            f"overloaded or stopped; after {limit_seconds:g} s without an answer a new process continues its work"
        )

    def _fall_asleep(self, process: WorkerProcess) -> None:
        """Offer the process to no more callers, before it stops. A call that it already has stays in its journal."""
        self._is_asleep = True
        self._wanted.clear()
        seconds = self._limits.suspend_after_seconds
        self._lost(f"waking {self._subject}: no client had used it for {seconds:g} s", needs_mending=False)
        self._loading_since = asyncio.get_running_loop().time()
        log.info(f"{self._role} suspended", worker_id=self._called, pid=process.pid, reason="idle")

    def _lost(self, reason: str | None, needs_mending: bool) -> None:
        self._running, self._lost_for, self._needs_mending = None, reason, needs_mending
        if needs_mending:
            self._settled.set()
        else:
            self._settled.clear()


async def _first_of(*waits: Coroutine[Any, Any, None]) -> None:
    """Return when the first wait ends, and cancel the others. Raises the error of the first wait."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _to_the_end(stop: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine to its end, even if the caller is cancelled."""
    task = asyncio.create_task(stop)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class Supervisor(ProcessSupervisor, ActivatedHandle):
    """The supervisor of a worker."""

    def __init__(
        self,
        worker_id: str,
        base_model: str,
        command: Callable[[Path, int], Sequence[str]],
        sockets: Path,
        slots: int,
        device: Mapping[str, str] = {},
        limits: ProcessLimits = ProcessLimits(),
    ) -> None:
        """Prepare the worker. Until the worker reports its number of slots, `slots` is used as this number."""
        ProcessSupervisor.__init__(
            self,
            worker_id,
            base_model,
            command,
            sockets,
            role="worker",
            device=device,
            limits=limits,
        )
        ActivatedHandle.__init__(self, worker_id)
        self._has_epochs = asyncio.Event()
        self._slots = slots

    def open(self, epochs: Store) -> None:
        """Set the store that gives a worker an epoch. A worker that is ready before this call waits for the store."""
        self._epochs = epochs
        self._has_epochs.set()

    @property
    @override
    def slots(self) -> int:
        return self._slots

    @override
    async def _greet(self, process: WorkerProcess) -> None:
        description = await process.unless_dead(self._activate(process.client))
        self._slots = places_of(description) or self._slots

    @override
    async def _activate(self, client: GrpcWorkerClient) -> worker_pb2.DescribeReply:
        await self._has_epochs.wait()
        return await super()._activate(client)


class SamplerSupervisor(ProcessSupervisor, SamplerHandle):
    """The supervisor of a sampler process next to `worker`. `engine` is the kind of sampler.

    The sampler starts after the worker has loaded its model. At the start, a sampler process counts all used GPU memory
    as its own memory.
    """

    def __init__(
        self,
        worker: Supervisor,
        engine: str,
        command: Callable[[Path, int], Sequence[str]],
        sockets: Path,
        limits: ProcessLimits = ProcessLimits(),
    ) -> None:
        super().__init__(
            f"{worker.worker_id}-sampler",
            worker.base_model,
            command,
            sockets,
            role="sampler",
            device=worker.device,
            limits=limits,
        )
        self._worker = worker
        self._engine = engine

    @override
    async def _until_it_may_start(self) -> None:
        self._worker.want()
        await self._worker.loaded()

    @property
    @override
    def sampler_id(self) -> str:
        return self._called

    @property
    @override
    def name(self) -> str:
        return self._called

    @property
    @override
    def kind(self) -> SamplerKind:
        return "pool"

    @property
    @override
    def accepting(self) -> bool:
        """Return True, because the first sample starts a sampler that is not running."""
        return True

    @property
    @override
    def _task(self) -> str:
        return f"starting {self._engine} with {self._base_model}"

    @property
    @override
    def _subject(self) -> str:
        return f"{self._base_model} in {self._engine}"
