"""Free bytes of one file system: bytes that may be written, bytes that writers have claimed, and a reserve.

Most of the reserve is a real file, which other programs cannot fill. The file is deleted to make room for data that
must be written on a full disk (results, releases, the epoch). The reserve's file is created again when the disk has
space.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from tinsmith_trainer.disk.durable_files import Allocate

log = structlog.get_logger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
FREE_PART = 8
"""The divisor that gives the free part of the reserve, outside the reserve's file: one eighth.

A write-ahead log grows before its content is moved to the database file.
"""
BLOCK_BYTES = 512
"""The unit of `st_blocks`, which does not depend on the block size of the file system."""
MIB = 1024**2

ROOM_RETRY_SECONDS = 1.0
LONGEST_ROOM_RETRY_SECONDS = 30.0
"""The maximum wait between attempts.

An attempt may fill the disk, or run an operation for which no result can be written.

The wait doubles up to this maximum, to make attempts on a full disk rare.
"""

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class NoRoom(OSError):
    """An error for a disk that is full, or would be full after the write."""

    def __init__(self, directory: Path, content_bytes: int, free_bytes: int) -> None:
        super().__init__(
            errno.ENOSPC,
            f"{directory} has {free_bytes / MIB:.1f} MiB free without its reserve, and {content_bytes / MIB:.1f} MiB "
            "are needed: make room there",
        )


class DiskRoom:
    """The free space of one file system. Thread-safe.

    Writers claim space before they write, so that `reserved_bytes` stay free. `reserve` is a file that occupies most of
    the reserved bytes after a call of `keep_reserve`.
    """

    def __init__(self, directory: Path, reserved_bytes: int = 0, reserve: Path | None = None) -> None:
        self._directory = directory
        self._reserved_bytes = reserved_bytes
        self._reserve = reserve
        self._lock = threading.Lock()
        self._claimed_bytes = 0
        self._allocates_nothing = False  # the attempt to create the reserve's file shows this

    def free_bytes(self) -> int:
        """Return the free bytes, including the reserve.

        A file system without a reported size, such as some FUSE file systems, counts as unlimited.
        """
        disk = shutil.disk_usage(_existing(self._directory))
        return disk.free + self._reserve_file_bytes() if disk.total else sys.maxsize

    def has_room_for(self, content_bytes: int) -> bool:
        """Return whether this many bytes can be written without using the reserve or claimed space."""
        return content_bytes <= self.available_bytes()

    def available_bytes(self) -> int:
        """Return the bytes that may be written.

        The result is negative if the free space is smaller than the reserve.
        """
        return self.free_bytes() - self._reserved_bytes - self._claimed_bytes

    # ---- room for one writer

    def claim(self, content_bytes: int) -> None:
        """Claim the space until `release` is called. Raises NoRoom."""
        with self._lock:
            self._check(content_bytes)
            self._claimed_bytes += content_bytes

    def release(self, content_bytes: int) -> None:
        """Release a claim after the bytes are written, or if the bytes will not be written."""
        with self._lock:
            self._claimed_bytes -= content_bytes

    @contextlib.contextmanager
    def claimed(self, content_bytes: int) -> Iterator[Allocate]:
        """Claim space for one writer, and yield a function that allocates the blocks of the writer's files.

        Allocated blocks are no longer free, so each allocation makes the claim smaller by the same number of bytes.
        Raises NoRoom.
        """
        left_bytes = content_bytes

        def allocate(descriptor: int, size_bytes: int) -> None:
            nonlocal left_bytes
            _allocate(descriptor, size_bytes)
            self.release(size_bytes)
            left_bytes -= size_bytes

        self.claim(content_bytes)
        try:
            yield allocate
        finally:
            self.release(left_bytes)

    def allocate(self, descriptor: int, content_bytes: int) -> None:
        """Allocate all blocks of a new file at once, so that no other writer can count the same free space.

        Raises NoRoom.

        The lock is held for the claim only: the allocation may take long, and the event loop also needs the lock.
        """
        with self.claimed(content_bytes) as allocate:
            allocate(descriptor, content_bytes)

    def _check(self, content_bytes: int) -> None:
        available = self.available_bytes()
        if content_bytes > available:
            raise NoRoom(self._directory, content_bytes, max(available, 0))

    # ---- the reserve

    def keep_reserve(self) -> None:
        """Create the reserve's file if it is missing and the disk has space for the whole reserve.

        If the file system cannot allocate blocks, no file is created, and the next attempt follows only after the
        reserve was used.
        """
        file_bytes = self._reserved_bytes - self._reserved_bytes // FREE_PART
        with self._lock:
            if self._reserve is None or self._allocates_nothing or self._reserve_file_bytes() >= file_bytes:
                return
            if self.available_bytes() < 0:
                return
            try:
                with self._reserve.open("wb") as file:
                    _allocate(file.fileno(), file_bytes)
                self._allocates_nothing = self._reserve_file_bytes() < file_bytes
                if self._allocates_nothing:
                    raise OSError(errno.EOPNOTSUPP, "its file system allocates no blocks")
            except OSError as error:  # the free bytes are counted in any case, so a part of the reserve is kept
                log.warning("the reserve has no file", path=str(self._reserve), reason=error.strerror)
                self._reserve.unlink(missing_ok=True)

    def free_reserve(self) -> bool:
        """Delete the reserve's file to make room for a write that must succeed.

        Return False if the file did not exist.
        """
        with self._lock:
            self._allocates_nothing = False
            if self._reserve is None or not self._reserve_file_bytes():
                return False
            self._reserve.unlink()
        log.warning("the disk is full: its reserve is in use", path=str(self._reserve))
        return True

    def _reserve_file_bytes(self) -> int:
        if self._reserve is None:
            return 0
        try:
            return self._reserve.stat().st_blocks * BLOCK_BYTES
        except FileNotFoundError:
            return 0


def _existing(path: Path) -> Path:
    """Return the folder, or the nearest parent folder that exists.

    The checkpoint root may not exist yet: the first save creates it.
    """
    return next(folder for folder in (path, *path.parents) if folder.exists())


class RetriesForRoom:
    """The times at which failed writes are repeated until the disk has space.

    Each wait is twice as long as the previous wait. A wait ends early when more space is free than before.
    """

    def __init__(self, room: DiskRoom, clock: Callable[[], float] = time.monotonic) -> None:
        self._room = room
        self._clock = clock
        self._failed_at, self._free_bytes, self._seconds = 0.0, 0, ROOM_RETRY_SECONDS

    def begin(self) -> None:
        """Start with the shortest wait, after a first failure or a partial success."""
        self._note_failure(ROOM_RETRY_SECONDS)

    def failed(self) -> None:
        """Wait longer after a failed attempt."""
        self._note_failure(longer_retry_seconds(self._seconds))

    def is_due(self) -> bool:
        waited = self._clock() - self._failed_at
        has_more_room = waited >= ROOM_RETRY_SECONDS and self._room.free_bytes() > self._free_bytes
        return has_more_room or waited >= self._seconds

    def _note_failure(self, seconds: float) -> None:
        self._failed_at, self._free_bytes, self._seconds = self._clock(), self._room.free_bytes(), seconds


def longer_retry_seconds(before: float) -> float:
    """Return the next wait. `before` is the previous wait, 0 at the first failure."""
    return min(max(2 * before, ROOM_RETRY_SECONDS), LONGEST_ROOM_RETRY_SECONDS)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate the blocks of a file, if the file system can do this.

    On other file systems, `os.posix_fallocate` would write one byte to each 4 KiB; on a network file system each write
    is a request.
    """
    while size_bytes and _fallocate(descriptor, 0, 0, size_bytes):
        code = ctypes.get_errno()
        if code in CANNOT_ALLOCATE:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
