"""A worker's volume: one folder that holds the journal and the snapshots, and one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from tinsmith_trainer.durable_files import make_directory
from tinsmith_trainer.errors import VolumeUnsuitable
from tinsmith_trainer.worker.journal_volume_check import check_file_system

LOCK_POLL_SECONDS = 0.05
RESERVED_BYTES = 64 * 1024 * 1024
"""Kept free for results and snapshots of what was already accepted."""


class Volume:
    """The folder, locked by this process until it ends."""

    def __init__(self, directory: Path, *, reserved_bytes: int = RESERVED_BYTES) -> None:
        """Raises VolumeUnsuitable."""
        self.directory = directory
        self._reserved_bytes = reserved_bytes
        try:
            make_directory(directory)
            check_file_system(directory)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise VolumeUnsuitable(
                f"The volume {directory} cannot be written: {error.strerror}. "
                f"It must be a folder that user {os.geteuid()} may write to."
            ) from error

    def wait_for_lock(self) -> None:
        """Returns when no other worker uses this folder; a predecessor that is dying takes a moment."""
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
            else:
                return

    def has_room_for(self, content_bytes: int) -> bool:
        """Whether accepting this much leaves the reserve untouched."""
        return self.free_bytes() - content_bytes >= self._reserved_bytes

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.directory).free

    @property
    def journal_path(self) -> Path:
        return self.directory / "journal.sqlite"

    @property
    def in_flight_marker_path(self) -> Path:
        return self.directory / "running"

    @property
    def snapshots_path(self) -> Path:
        return self.directory / "snapshots"
