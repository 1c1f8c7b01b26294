"""A worker's volume: one folder for the journal and the snapshots. Only one process uses the volume at a time."""

from __future__ import annotations

import fcntl
import os
import re
import time
from functools import partial
from pathlib import Path

from tinsmith_trainer.disk.durable_files import make_directory, remove_unfinished
from tinsmith_trainer.disk.free_space import DiskRoom
from tinsmith_trainer.errors import ModelChanged, VolumeUnsuitable
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

LOCK_POLL_SECONDS = 0.05
RESERVED_BYTES = 64 * 1024 * 1024
"""The disk space reserved for results of accepted operations, for releases, and for the epoch of a start."""


class Volume:
    """The folder of a volume, which this process locks until the process ends."""

    def __init__(self, directory: Path, *, reserved_bytes: int = RESERVED_BYTES) -> None:
        """Open the folder. Raises VolumeUnsuitable."""
        self.directory = directory
        self.room = DiskRoom(directory, reserved_bytes, directory / "reserve")
        try:
            make_directory(directory)
            check_file_system(directory)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise VolumeUnsuitable(
                f"The volume {directory} cannot be written: {error.strerror}. "
                f"It must be a folder that user {os.geteuid()} may write to."
            ) from error

    def take(self) -> None:
        """Wait until no other worker uses the folder, and lock the folder.

        Remove the unfinished files of a killed worker.

        The wait is short if a previous worker is just shutting down. Unfinished files may fill the disk, so they are
        removed before the first write.
        """
        self._wait_for_lock()
        if self.snapshots_path.is_dir():
            remove_unfinished(self.snapshots_path)
        self.room.keep_reserve()

    def _wait_for_lock(self) -> None:
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
            else:
                return

    @property
    def journal_path(self) -> Path:
        return self.directory / "journal.sqlite"

    @property
    def in_flight_marker_path(self) -> Path:
        return self.directory / "running"

    @property
    def snapshots_path(self) -> Path:
        return self.directory / "snapshots"


def check_base_model(journal: Journal, info: BaseModelInfo, directory: Path, models: int) -> None:
    """Record the base weights in the journal.

    Raises ModelChanged if `models` were trained on other weights, because a replay would give other results.
    """
    now = {"base_model_revision": info.revision, "base_model_quantization": info.quantization}
    before = {name: journal.read(partial(journal_tables.get_meta, key=name)).result() for name in now}
    revision, quantization = before["base_model_revision"], before["base_model_quantization"] or ""
    if models and revision is not None and revision != info.revision:
        raise ModelChanged(
            f"The files of {info.path} changed (weights {revision[:12]} before, {info.revision[:12]} now), but "
            f"{models} model(s) of the journal in {directory} were trained on the old ones. "
            "Put the old files back, or serve the new ones under another directory."
        )
    if models and revision is not None and quantization != info.quantization:
        raise ModelChanged(
            f"{models} model(s) of the journal in {directory} were trained on {info.path} {_in_bits(quantization)}, "
            f"and this worker has it {_in_bits(info.quantization)}. Start it as before, or let their sessions end."
        )
    for name, value in now.items():
        if before[name] != value:
            journal.write(partial(journal_tables.set_meta, key=name, value=value), uses_reserve=True).result()


def _in_bits(quantization: str) -> str:
    return f"with --quantization {quantization}" if quantization else "without --quantization"


MOUNTINFO = Path("/proc/self/mountinfo")
UNSUITABLE = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse", "fuseblk"})


def check_file_system(directory: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Refuse an unsuitable file system. Raises VolumeUnsuitable.

    If the kernel does not list the mounts, the check is skipped.
    """
    try:
        content = mountinfo.read_text(errors="surrogateescape")
    except OSError:
        return
    kind = file_system_of(directory.resolve(), content)
    if kind is not None and is_unsuitable(kind):
        raise VolumeUnsuitable(
            f"The volume {directory} is on {kind}, where a journal's locks and syncs do not hold what they promise, "
            "and acknowledged work could be lost. Put it on block storage with a file system of its own, or on a "
            "local disk."
        )


def is_unsuitable(kind: str) -> bool:
    return kind in UNSUITABLE or kind.startswith("fuse.")


def file_system_of(directory: Path, mountinfo: str) -> str | None:
    """Return the type of a directory's file system: the type of the deepest mount that contains the directory.

    If several mounts have the same path, the last mount counts.
    """
    deepest, found = -1, None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mount_point = Path(_unescaped(fields[4]))
        depth = len(mount_point.parts)
        if directory.is_relative_to(mount_point) and depth >= deepest:
            deepest, found = depth, after.split(" ")[0]
    return found


def _unescaped(text: str) -> str:
    """Decode the kernel's octal escapes for space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
