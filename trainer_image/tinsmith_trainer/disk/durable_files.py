"""Files that are complete or absent after a power cut.

Each file is written under a temporary name, synced and renamed; then the folder of the file is synced. Large files
bypass the page cache, because the files are not read again soon. On a virtual machine, a write to new pages of the
cache takes three times as long as a write to the disk.
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
"""The content of a file as a sequence of pieces; each piece is a memory view of bytes. No piece is copied."""

TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".", ".tmp"

BLOCK_BYTES = 4 * 1024**2
ALIGNMENT_BYTES = 4096
"""The alignment of memory, offsets and lengths. Every disk accepts this alignment for writes without the page cache."""

HEAD_BYTES = 8
Allocate = Callable[[int, int], None]
"""A function that allocates the blocks of an open file before the content is written.

The arguments of the function are the file descriptor and the size.

The function raises OSError if the disk has no space.
"""

MemoryFor = Callable[[bytes, int], memoryview]
"""A function that returns memory for a file's content, as a view of bytes.

The arguments of the function are the first HEAD_BYTES of the file, and the size of the file.
"""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The content of a file, and the digest of this content."""

    content: bytes | memoryview
    sha256: str


def sync_directory(directory: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a folder and all missing parent folders. The names of the new folders survive a power cut."""
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
    """Write and sync `content` under `path`. Until the final rename, `path` refers to the old file, or to no file.

    After an error, no part of the new file remains. Without `sync_folder`, the caller must sync the folder to make the
    name durable. One sync for many files saves time.
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
    """Remove the temporary files that killed processes left in a folder."""
    for path in directory.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def hashed_while(write: Callable[[], object], content: Pieces) -> WrittenFile:
    """Run `write`, and hash the content in another thread at the same time. Return the digest.

    Raises the errors of `write`.
    """
    with ThreadPoolExecutor(1, "hasher") as hasher:
        digest = hasher.submit(sha256_of, *content)
        write()
        return WrittenFile(digest.result(), size_of(content))


def read_hashed(path: Path, memory_for: MemoryFor, *, from_disk: bool = False) -> ReadFile:
    """Read a whole file. At the same time a thread hashes the file block by block.

    Raises OSError. The file is not mapped: if a mapped file is truncated, or the disk fails, the whole process ends.
    With `from_disk` the kernel drops the cached pages of the file, so that a damaged page is not read again.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "hasher") as hasher:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        head = file.read(HEAD_BYTES)
        content = memory_for(head, max(os.fstat(file.fileno()).st_size, len(head)))
        content[: len(head)] = head
        filled, hashing = len(head), [hasher.submit(digest.update, head)]
        while taken := file.readinto(content[filled : filled + BLOCK_BYTES]):
            hashing.append(hasher.submit(digest.update, content[filled : filled + taken]))
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
    """Return the total size in bytes."""
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
            if error.errno != errno.EINVAL:  # this file system supports only the page cache
                raise
        path.unlink(missing_ok=True)  # such a file system may have created the file nevertheless
    return os.open(path, flags, mode)


def _blocks(content: Pieces) -> Iterator[memoryview]:
    """Yield all content through one aligned buffer, which the next block overwrites. The last block is padded."""
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
            # The disk needs another alignment, or an earlier write was short.
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise
            continue
        block = block[written:]


def _leave_direct(descriptor: int) -> bool:
    """Switch a file to writes through the page cache. Return False if the file used the page cache already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
