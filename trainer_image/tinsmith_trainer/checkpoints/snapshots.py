"""Snapshots: files on the worker's volume.

A snapshot has the complete state of one model, from which a replay continues.

A snapshot is a safetensors file. The metadata of the file holds the adapter's shape, the optimizer's step, the last
applied operation and the window. The tensors in a snapshot are the tensors of an `AdapterState`. The journal records
the file name and the digest of the current snapshot. Every file that the journal does not record is left over from a
crash.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from tinsmith_trainer.disk.durable_files import Pieces, ReadFile, make_directory, read_hashed, write_file
from tinsmith_trainer.disk.free_space import DiskRoom
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import SIZE_BYTES, header_end, memory_for_tensors, tensor_file, tensors_of
from tinsmith_trainer.errors import Failure, ServerError, SnapshotDamaged
from tinsmith_trainer.process.failpoints import reach

log = structlog.get_logger(__name__)

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024**2
"""The limit for a snapshot's header.

In a file that is not a snapshot, the field for the header's length may hold any number.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a model after operation `applied`."""

    model_id: str
    applied: int
    state: AdapterState
    window_failure: Failure | None
    """The reason why the gradient since the last optim_step is incomplete.

    If the reason is set, the next optim_step fails with this reason.
    """


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    name: str
    digest: str


class SnapshotFolder:
    """The snapshot files of one worker."""

    def __init__(self, folder: Path, room: DiskRoom | None = None) -> None:
        """Open the folder. `room` is the free space of the folder's disk. Snapshots do not use the reserve."""
        self._folder = folder
        make_directory(folder)
        self._room = room or DiskRoom(folder)

    def has_room_for(self, size_bytes: int) -> bool:
        return self._room.has_room_for(size_bytes)

    def write(self, snapshot: Snapshot) -> SnapshotFile:
        """Write a snapshot under a new name, durable on return. The journal decides whether the snapshot is valid.

        After an OSError, no file remains.
        """
        content = _encode(snapshot)
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '.', snapshot.model_id)}.{snapshot.applied}.safetensors"
        reach("snapshot-mid-write")
        written = write_file(
            self._folder / name,
            content,
            allocate=self._room.allocate,
            before_rename=lambda: reach("snapshot-before-rename"),
        )
        reach("snapshot-before-commit")
        return SnapshotFile(name, written.sha256)

    def read(self, file: SnapshotFile) -> Snapshot:
        """Read a snapshot.

        Raises SnapshotDamaged if the file is missing or altered, and ServerError if reading the file fails for now.
        """
        return _decode(self._checked(file).content)

    def is_sound(self, file: SnapshotFile) -> bool:
        """Return whether the file exists and is unaltered. Raises ServerError if reading the file fails for now."""
        try:
            self._checked(file)
        except SnapshotDamaged:
            return False
        return True

    def _checked(self, file: SnapshotFile) -> ReadFile:
        """Read and verify a snapshot.

        If the digest differs, read the snapshot again without the page cache, because only the cached page may be
        damaged.
        """
        path = self._folder / file.name
        found = _read(path)
        if found.sha256 != file.digest:
            log.warning("a snapshot's digest differs; reading it again from the disk", path=str(path))
            found = _read(path, from_disk=True)
        if found.sha256 != file.digest:
            raise SnapshotDamaged(f"The snapshot {path} is damaged: its digest differs from the journal's.")
        return found

    def peek(self, file: SnapshotFile) -> tuple[int, int]:
        """Return the rank and the optimizer step, without reading tensors.

        Raises SnapshotDamaged if the file is missing.
        """
        path = self._folder / file.name
        try:
            with path.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                description = _description(opened.read(min(size, MAX_HEADER_BYTES)))
        except FileNotFoundError as error:
            raise SnapshotDamaged(f"The snapshot {path} is missing.") from error
        return int(description["lora"]["rank"]), int(description["optimizer_step"])

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove all files that are not listed, including partial files, but no folders (such as lost+found)."""
        kept = set(names)
        for path in self._folder.iterdir():
            if path.name not in kept and not path.is_dir():
                path.unlink()

    def newest_written_at(self) -> float:
        """Return the time of the newest snapshot in Unix seconds, or 0 if there is no snapshot."""
        return max((path.stat().st_mtime for path in self._folder.iterdir() if path.is_file()), default=0.0)

    def remove(self, name: str) -> None:
        """Remove a file. If the removal fails, the next start removes the file."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()


def _read(path: Path, *, from_disk: bool = False) -> ReadFile:
    try:
        return read_hashed(path, memory_for_tensors, from_disk=from_disk)
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"The snapshot {path} is missing.") from error
    except OSError as error:
        raise ServerError(f"The snapshot {path} cannot be read: {error.strerror}.") from error


def _encode(snapshot: Snapshot) -> Pieces:
    description = {
        "format_version": FORMAT_VERSION,
        "model_id": snapshot.model_id,
        "applied": snapshot.applied,
        "lora": asdict(snapshot.state.lora),
        "optimizer_step": snapshot.state.optimizer_step,
        "window_failure": asdict(snapshot.window_failure) if snapshot.window_failure else None,
    }
    return tensor_file(snapshot.state.tensors, {"tinsmith": json.dumps(description)})


def _description(header: bytes) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(json.loads(header)["__metadata__"]["tinsmith"])
    return description


def _decode(content: bytes | memoryview) -> Snapshot:
    end = header_end(bytes(content[:SIZE_BYTES]))
    description = _description(bytes(content[SIZE_BYTES:end]))
    if description["format_version"] != FORMAT_VERSION:
        raise ServerError(
            f"A snapshot has format {description['format_version']}; this worker reads format {FORMAT_VERSION}."
        )
    failure = description["window_failure"]
    state = AdapterState(LoraSpec(**description["lora"]), description["optimizer_step"], tensors_of(content))
    return Snapshot(description["model_id"], description["applied"], state, Failure(**failure) if failure else None)
