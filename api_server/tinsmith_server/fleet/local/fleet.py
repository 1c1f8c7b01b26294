"""Workers as child processes of this server. Each model directory has one worker for each device.

If a worker cannot sample, a separate sampler runs on the same device.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from typing_extensions import override

from tinsmith_server.configuration import make_data_directory
from tinsmith_server.errors import StartupError, WorkerAbsent
from tinsmith_server.fleet.base import Changes, Fleet, SamplerHandle, ServedModel, WorkerHandle
from tinsmith_server.fleet.local.commands import BUILTIN, SamplerCommand, WorkerCommand, check_commands
from tinsmith_server.fleet.local.devices import Place, places
from tinsmith_server.fleet.local.model_sources import ModelDirectory, locate_models
from tinsmith_server.fleet.local.supervisor import ProcessLimits, ProcessSupervisor, SamplerSupervisor, Supervisor
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Worker

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store

# sockaddr_un holds 108 bytes on Linux and 104 elsewhere, including the final zero.
MAX_SOCKET_PATH_BYTES = 100


class LocalFleet(Fleet):
    """The workers of this machine.

    The constructor raises StartupError for a missing model directory, and for flags that the worker refuses.
    """

    def __init__(self, settings: Settings, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """Locate the models, and check the flags.

        `on_progress` is called with the progress of loading.
        """
        self._settings = settings
        self._on_progress = on_progress
        self._directories = locate_models(settings.models)
        if self._directories:
            check_commands(settings, self._directories[0])
        self._places = places(settings.devices)
        self._models = {directory.served.name: directory.served for directory in self._directories}
        self._changes = Changes()
        self._supervisors: dict[str, Supervisor] = {}
        self._samplers: dict[str, SamplerSupervisor] = {}
        self._sockets: Path | None = None
        self._lock: IO[bytes] | None = None
        self._preloading: list[asyncio.Task[None]] = []

    @override
    async def begin(self) -> None:
        """Start the workers. The workers load their models while the server is still starting."""
        self._lock = _lock_data(self._settings.data)
        self._sockets = _socket_directory(self._settings.data)
        for directory in self._directories:
            for place in self._places:
                self._supervise(directory, place, self._sockets)
        if self._settings.preload_models:
            loading = (process.preload(self._on_progress) for process in self._processes)
            self._preloading = [asyncio.create_task(one, context=contextvars.Context()) for one in loading]

    def _supervise(self, directory: ModelDirectory, place: Place, sockets: Path) -> None:
        """Add a supervisor for the weights in the directory, on the device of the place.

        All names of the weights share this supervisor.
        """
        worker_id, index = place.worker_id(directory.served.weights), len(self._supervisors)
        if worker_id in self._supervisors:
            return
        limits = ProcessLimits(self._settings.suspend_after_seconds, self._settings.hang_timeout_seconds)
        self._supervisors[worker_id] = Supervisor(
            worker_id,
            directory.served.name,
            WorkerCommand(self._settings, directory, place),
            sockets / f"w{index}",
            self._settings.model_places or self._settings.adapter_slots,
            place.environment,
            limits,
        )
        if self._settings.sampler != BUILTIN:
            self._samplers[worker_id] = SamplerSupervisor(
                self._supervisors[worker_id],
                self._settings.sampler,
                SamplerCommand(self._settings, directory, place),
                sockets / f"s{index}",
                limits,
            )

    @override
    async def open(self, epochs: Store) -> None:
        if self._lock is None:
            await self.begin()
        for supervisor in self._supervisors.values():
            supervisor.open(epochs)

    @override
    async def close(self) -> None:
        for task in self._preloading:
            task.cancel()
        await asyncio.gather(*self._preloading, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _processes(self) -> Sequence[ProcessSupervisor]:
        return [*self._supervisors.values(), *self._samplers.values()]

    @property
    @override
    def changes(self) -> Changes:
        """A counter that never changes, because the models are known at the start."""
        return self._changes

    @property
    @override
    def models(self) -> Sequence[ServedModel]:
        return list(self._models.values())

    @override
    def model(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    @property
    @override
    def workers(self) -> Sequence[WorkerHandle]:
        return list(self._supervisors.values())

    @override
    def worker(self, worker_id: str) -> WorkerHandle:
        try:
            return self._supervisors[worker_id]
        except KeyError:
            raise WorkerAbsent(
                f"this server was started without the model directory or the device of {worker_id}; add the model "
                "with --model, or list as many --devices as before"
            ) from None

    @override
    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        """Return the workers of the directory, for any rank. A worker refuses a rank that it does not support."""
        return [self._supervisors[worker_id] for worker_id in self._worker_ids(base_model)]

    @override
    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        """Return the sampler processes, or the workers if the workers themselves sample, for any rank.

        A sampler refuses a rank that it does not support.
        """
        if not self._samplers:
            return self.trainers(base_model, rank)
        return [self._samplers[worker_id] for worker_id in self._worker_ids(base_model)]

    def _worker_ids(self, base_model: str) -> list[str]:
        served = self.model(base_model)
        return [] if served is None else [place.worker_id(served.weights) for place in self._places]

    @property
    @override
    def all_samplers(self) -> Sequence[SamplerHandle]:
        return list(self._samplers.values()) or self.workers

    @override
    async def refresh(self) -> None:
        """Do nothing, because the workers do not change while the server runs."""

    @override
    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        if self.model(base_model) is None:
            return f"this server was started without {base_model}; add it with --model"
        # A worker reports how many models it takes after it has loaded its base model.
        reasons = [worker.unavailable_reason for worker in self.trainers(base_model, rank) if worker.unavailable_reason]
        return reasons[0] if reasons else "wait for a session to end, or restart the server with more model_places"

    @override
    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        """Return None, because the next start may name the model's directory again."""
        return None

    @property
    @override
    def problem(self) -> str | None:
        return None


def _lock_data(data: Path) -> IO[bytes]:
    """Lock the data directory.

    Two servers with the same data directory would repeatedly stop the workers of the other server.
    """
    make_data_directory(data)
    lock = (data / "server.lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StartupError(f"another server uses the data directory {data}; stop it, or set another --data") from None
    return lock


def _socket_directory(data: Path) -> Path:
    """Return a private directory with a path that leaves room for a socket's name.

    The directory's name is derived from the data directory, which this server has locked. An existing directory of this
    name therefore belonged to a killed server, and is removed.
    """
    prefix = f"tinsmith-{hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:8]}-"
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        with contextlib.suppress(OSError):
            for left_behind in parent.glob(f"{prefix}*"):
                shutil.rmtree(left_behind, ignore_errors=True)
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            if len(os.fsencode(path)) + 16 <= MAX_SOCKET_PATH_BYTES:
                return path
            path.rmdir()
    raise StartupError("no directory for temporary files has a path short enough for a Unix socket; set TMPDIR")
