"""A worker's volume: one folder that holds the journal and the snapshots, and one process at a time."""

from __future__ import annotations

import fcntl
import os
import time
from functools import partial
from pathlib import Path

from tinsmith_trainer.disk.durable_files import make_directory, remove_unfinished
from tinsmith_trainer.disk.free_space import DiskRoom
from tinsmith_trainer.errors import ModelChanged, VolumeUnsuitable
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.worker.journal_volume_check import check_file_system

LOCK_POLL_SECONDS = 0.05
RESERVED_BYTES = 64 * 1024 * 1024
"""Kept for results of what was already accepted, for releases, and for the epoch of a start."""


class Volume:
    """The folder, locked by this process until it ends."""

    def __init__(self, directory: Path, *, reserved_bytes: int = RESERVED_BYTES) -> None:
        """Raises VolumeUnsuitable."""
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
        """Returns when no other worker uses this folder, and what a killed one left half-written is gone.

        A predecessor that is dying takes a moment. What it left may be all that fills the disk, so it goes before
        anything is written to the journal.
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
    """Notes the base weights in the journal. Raises ModelChanged where `models` were trained on others.

    Other ones would make a replay a lie, unless nothing depends on the old ones.
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
