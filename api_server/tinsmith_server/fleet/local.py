"""Workers as child processes of this server: one per base-model directory, started at first use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from typing_extensions import override

from tinsmith_server.errors import StartupError, WorkerUnavailable
from tinsmith_server.fleet.base import EpochRegistry, Fleet, ServedModel, WorkerHandle
from tinsmith_server.fleet.sources import ModelDirectory, locate_models
from tinsmith_server.fleet.supervisor import Supervisor
from tinsmith_server.logs import chosen_format
from tinsmith_server.settings import Settings

# sockaddr_un holds 108 bytes on Linux and 104 elsewhere, the final zero included.
MAX_SOCKET_PATH_BYTES = 100


class LocalFleet(Fleet):
    """Raises StartupError from the constructor when a model directory is missing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directories = locate_models(settings.models)
        self._models = {directory.served.name: directory.served for directory in self._directories}
        self._supervisors: dict[str, Supervisor] = {}
        self._sockets: Path | None = None
        self._lock: IO[bytes] | None = None

    @override
    async def open(self, epochs: EpochRegistry) -> None:
        self._lock = _lock_data(self._settings.data)
        self._sockets = _socket_directory()
        for index, directory in enumerate(self._directories):
            worker_id = directory.served.worker_id
            if worker_id not in self._supervisors:
                command = WorkerCommand(self._settings, directory)
                self._supervisors[worker_id] = Supervisor(worker_id, command, self._sockets, f"w{index}", epochs)

    @override
    async def close(self) -> None:
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors.values()))
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

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
            raise WorkerUnavailable(
                f"this server was started without the model directory of {worker_id}; add it with --model"
            ) from None


class WorkerCommand:
    """The command line of one worker."""

    def __init__(self, settings: Settings, directory: ModelDirectory) -> None:
        self._settings = settings
        self._directory = directory

    @property
    def volume(self) -> Path:
        return self._settings.data.absolute() / "workers" / self._directory.served.worker_id

    def __call__(self, socket: Path, parent_fd: int) -> list[str]:
        settings = self._settings
        self.volume.mkdir(parents=True, exist_ok=True)
        return [
            *(sys.executable, "-m", "tinsmith_trainer"),
            *("--model", str(self._directory.path)),
            *("--volume", str(self.volume)),
            *("--socket", str(socket)),
            *("--checkpoint-root", settings.checkpoints_url),
            *("--parent-fd", str(parent_fd)),
            *("--engine", settings.engine),
            *("--adapter-slots", str(settings.adapter_slots)),
            *("--max-rank", str(settings.max_rank)),
            "--map-stable-reinforce" if settings.map_stable_reinforce else "--no-map-stable-reinforce",
            "--deterministic-sampling" if settings.deterministic_sampling else "--no-deterministic-sampling",
            *("--log-format", chosen_format(settings.log_format)),
            *("--log-level", settings.log_level),
        ]


def _lock_data(data: Path) -> IO[bytes]:
    """Two servers on one directory would fence each other's workers out, for ever."""
    data.mkdir(parents=True, exist_ok=True)
    lock = (data / "server.lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StartupError(f"another server uses the data directory {data}; stop it, or give --data") from None
    return lock


def _socket_directory() -> Path:
    """A private directory whose path leaves room for a socket's name."""
    candidates = [None, "/tmp"]
    for candidate in candidates:
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="tinsmith-", dir=candidate))
            if len(os.fsencode(path)) + 16 <= MAX_SOCKET_PATH_BYTES:
                return path
            path.rmdir()
    raise StartupError("no directory for temporary files has a path short enough for a Unix socket; set TMPDIR")
