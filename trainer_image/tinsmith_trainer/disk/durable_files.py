"""Files that are either whole or absent after a power cut: temporary name, fsync, rename, fsync of the folder.

Large ones go past the page cache. Nobody is about to read them again, and on a virtual machine pages that no file had
before cost three times what the disk does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Pieces = Sequence[bytes | memoryview]
"""A file's content, one after the other; views are of single bytes. None is copied to make it."""

TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".", ".tmp"

BLOCK_BYTES = 4 * 1024**2
ALIGNMENT_BYTES = 4096
"""Of memory, offsets and lengths, for any disk that goes without the page cache."""

HEAD_BYTES = 8
Allocate = Callable[[int, int], None]
"""Gives an open file, by descriptor and size, its blocks before its content is written. Raises OSError without room."""

MemoryFor = Callable[[bytes, int], memoryview]
"""Where a file's content is to go, by its first HEAD_BYTES and its size: memory of single bytes, as many as it has."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file's content, and the digest of what was read."""

    content: bytes | memoryview
    sha256: str


def sync_directory(directory: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Creates a folder and its missing parents; their names survive a power cut."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def write_file(
    path: Path,
    content: Pieces,
    *,
    mode: int = 0o666,
    allocate: Allocate | None = None,
    before_rename: Callable[[], None] | None = None,
    sync_folder: bool = True,
) -> WrittenFile:
    """Writes and syncs `content` under `path`, whose name shows the old file or none until the last moment.

    Whatever goes wrong, no part of the new file stays. Without `sync_folder` the name is durable only once the caller
    has synced the folder, as one does for many files at once.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}{TEMPORARY_SUFFIX}")
    try:
        written = hashed_while(lambda: _write_and_sync(temporary, content, mode, allocate), content)
        if before_rename is not None:
            before_rename()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync_folder:
        sync_directory(path.parent)
    return written


def remove_unfinished(directory: Path) -> None:
    """Removes what `write_file` of a process that was killed has left in a folder."""
    for path in directory.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def hashed_while(write: Callable[[], object], content: Pieces) -> WrittenFile:
    """What `write` writes; a thread hashes it meanwhile. Raises what `write` does."""
    with ThreadPoolExecutor(1, "hasher") as beside:
        digest = beside.submit(sha256_of, *content)
        write()
        return WrittenFile(digest.result(), size_of(content))


def read_hashed(path: Path, memory_for: MemoryFor, *, from_disk: bool = False) -> ReadFile:
    """All of a file; a thread hashes it meanwhile, block by block. Raises OSError.

    It is read, and not mapped: where somebody shortens a mapped file, or its disk fails, the whole process ends.
    `from_disk`: the kernel drops the pages that it has of the file, so that a bad page is not read once more.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "hasher") as beside:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        head = file.read(HEAD_BYTES)
        content = memory_for(head, max(os.fstat(file.fileno()).st_size, len(head)))
        content[: len(head)] = head
        filled, hashing = len(head), [beside.submit(digest.update, head)]
        while taken := file.readinto(content[filled : filled + BLOCK_BYTES]):
            hashing.append(beside.submit(digest.update, content[filled : filled + taken]))
            filled += taken
        for block in hashing:
            block.result()
    return ReadFile(content[:filled], digest.hexdigest())


def sha256_of(*content: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()


def size_of(content: Pieces) -> int:
    """In bytes."""
    return sum(map(len, content))


def _write_and_sync(path: Path, content: Pieces, mode: int, allocate: Allocate | None) -> None:
    size_bytes = size_of(content)
    is_large = size_bytes >= BLOCK_BYTES
    descriptor = _open_new(path, mode, is_large=is_large)
    try:
        if allocate is not None:
            allocate(descriptor, size_bytes)
        for block in _blocks(content) if is_large else (memoryview(piece) for piece in content):
            _write_all(descriptor, block)
        os.ftruncate(descriptor, size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_new(path: Path, mode: int, *, is_large: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    path.unlink(missing_ok=True)
    if is_large:
        try:
            return os.open(path, flags | os.O_DIRECT, mode)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that knows only the page cache
                raise
        path.unlink(missing_ok=True)  # such a file system may have made the file all the same
    return os.open(path, flags, mode)


def _blocks(content: Pieces) -> Iterator[memoryview]:
    """All of it through one aligned buffer, which the next block overwrites; the last ends in some bytes too many."""
    buffer, filled = memoryview(mmap.mmap(-1, BLOCK_BYTES)), 0
    for piece in content:
        rest = memoryview(piece)
        while rest:
            taken = rest[: BLOCK_BYTES - filled]
            buffer[filled : filled + len(taken)] = taken
            filled, rest = filled + len(taken), rest[len(taken) :]
            if filled == BLOCK_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[: _aligned(filled)]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        try:
            written = os.write(descriptor, block)
        except OSError as error:
            # Of a disk that is aligned otherwise, or of what a write that ended early has left.
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise
            continue
        block = block[written:]


def _leave_direct(descriptor: int) -> bool:
    """From now on it writes through the page cache. False: it did already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
