"""Storage of checkpoints in a folder or an object store: any fsspec URL.

The files of a directory are written together; the last file makes the directory valid. A folder is synced to disk. An
object is complete as soon as the store acknowledges the upload. Listings and contents are not cached, because other
workers write to the same place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tinsmith_trainer.disk.durable_files import (
    Allocate,
    MemoryFor,
    Pieces,
    ReadFile,
    WrittenFile,
    hashed_while,
    read_hashed,
    sha256_of,
    size_of,
    sync_directory,
    write_file,
)
from tinsmith_trainer.disk.free_space import NO_ROOM, DiskRoom, NoRoom
from tinsmith_trainer.errors import ServerError

T = TypeVar("T")
R = TypeVar("R")

PARALLEL_REQUESTS = 8
FINISHED_MODE = 0o444
"""The mode of files.

A file never changes under the final name, and several checkpoints may share a file by hard links.
"""

PERMANENT_ERRNOS = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EREMCHG),
        *(errno.EINVAL, errno.ENAMETOOLONG, errno.EMSGSIZE, errno.ENOSYS),
    }
)
"""The numbers of permanent errors, of file systems and of object stores with drivers that use the same numbers.

The status 403 of an object store is not in this set, because a rotation of the store's key may be in progress.
"""


class StorageFault(Exception):
    """An error for a storage that refused a request, or could not be reached even after retries.

    `is_full`: the storage has no room. `is_transient`: the same request may succeed later, for example after files were
    deleted.
    """

    def __init__(self, message: str, *, is_transient: bool, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.is_full = is_full


class FileTooLarge(Exception):
    """An error for a file with more bytes than the reader accepts. No byte of the file was read."""

    def __init__(self, name: str, size_bytes: int, most_bytes: int) -> None:
        super().__init__(f"{name} has {size_bytes} bytes")
        self.name = name
        self.size_bytes = size_bytes
        self.most_bytes = most_bytes


class CheckpointStorage:
    """Blocking calls to a storage, for use in threads.

    Paths are relative to the root. Every method can raise StorageFault.
    """

    def __init__(self, url: str, *, reserved_bytes: int = 0) -> None:
        """Open the URL. If the root is a folder, `reserved_bytes` stay free on the folder's disk.

        Raises ServerError if the URL's protocol is not supported.
        """
        self.url = url
        try:
            fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **driver_options(url, os.environ))
        except (ImportError, ValueError) as error:
            raise ServerError(f"The checkpoint root {url} cannot be opened: {error}.") from error
        self._fs: Any = fs
        self._path = str(path).rstrip("/")
        self._is_local = isinstance(fs, LocalFileSystem)
        self._disk = DiskRoom(Path(self._path), reserved_bytes)

    @property
    def folder(self) -> Path | None:
        """The folder of the root, or None for an object store."""
        return Path(self._path) if self._is_local else None

    def write(
        self,
        directory: str,
        files: Mapping[str, Pieces],
        last: str,
        content: Callable[[dict[str, WrittenFile]], bytes],
        *,
        may_use_reserve: bool = False,
    ) -> bytes:
        """Write files, durable on return.

        The function `content` computes the content of the last file after all other files are written; this content is
        returned.

        If one file of a call cannot be written to a folder, all files of the call are removed.
        """
        try:
            size_bytes = sum(map(size_of, files.values()))
            room = self._room(size_bytes, may_use_reserve=may_use_reserve)
            with room as allocate, self._folder(directory, [*files, last]):
                return self._write_all(f"{self._path}/{directory}", files, last, content, allocate)
        except Exception as error:
            raise _fault(error) from error

    def _write_all(
        self,
        folder: str,
        files: Mapping[str, Pieces],
        last: str,
        content: Callable[[dict[str, WrittenFile]], bytes],
        allocate: Allocate | None,
    ) -> bytes:
        if not self._fs.async_impl:  # object stores have no folders, and s3fs would create the bucket
            self._fs.makedirs(folder, exist_ok=True)
        written = self._together(lambda name: self._write_file(f"{folder}/{name}", files[name], allocate), files)
        ending = content(dict(zip(files, written, strict=True)))
        if self._is_local:
            sync_directory(Path(folder))  # no file name may be lost once the last file exists
        self._write_file(f"{folder}/{last}", [ending], None)
        if self._is_local:
            _sync_upwards(Path(folder), Path(self._path))
        return ending

    @contextlib.contextmanager
    def _folder(self, directory: str, names: Iterable[str]) -> Iterator[None]:
        """Remove the files and folder of a failed attempt. Without the removal, a full disk would stay full."""
        if not self._is_local:
            yield
            return
        folder = Path(self._path, directory)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                for name in names:
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()
            raise

    @contextlib.contextmanager
    def _room(self, size_bytes: int, *, may_use_reserve: bool) -> Iterator[Allocate | None]:
        """Claim disk space. Raises NoRoom. An object store has unlimited room."""
        if not self._is_local or may_use_reserve:
            yield None
            return
        with self._disk.claimed(size_bytes) as allocate:
            yield allocate

    def read(self, directory: str, names: Iterable[str]) -> dict[str, bytes | None]:
        """Return the contents of files by name, with None for a missing file."""
        return self._read_all(directory, names, self._read_file)

    def read_within(self, directory: str, most_bytes: Mapping[str, int]) -> dict[str, bytes | None]:
        """Read files that another process wrote. Check the size of each file before the read.

        Raises FileTooLarge.
        """
        return self._read_all(directory, most_bytes, lambda path: self._read_file_within(path, most_bytes))

    def read_hashed(
        self, directory: str, names: Iterable[str], memory_for: MemoryFor, *, from_disk: bool = False
    ) -> dict[str, ReadFile | None]:
        """Return the contents of files by name, with digests. `memory_for` provides memory for local files.

        `from_disk` is explained at `durable_files.read_hashed`.
        """
        return self._read_all(directory, names, lambda path: self._read_file_hashed(path, memory_for, from_disk))

    def _read_all(self, directory: str, names: Iterable[str], read: Callable[[str], R]) -> dict[str, R]:
        file_names = list(names)
        try:
            contents = self._together(lambda name: read(f"{self._path}/{directory}/{name}"), file_names)
        except FileTooLarge:
            raise
        except Exception as error:
            raise _fault(error) from error
        return dict(zip(file_names, contents, strict=True))

    def directories(self, prefix: str, holding: str) -> list[str]:
        """Return the directories with this prefix that contain this file, by one request."""
        parent, start = posixpath.split(f"{self._path}/{prefix}")
        try:
            if self._fs.async_impl:
                found = self._fs.find(parent, prefix=start)
            else:
                found = self._fs.glob(f"{parent}/{start}*/{holding}")
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _fault(error) from error
        folders = [posixpath.split(str(path)) for path in found]
        return sorted(folder[len(self._path) + 1 :] for folder, name in folders if name == holding)

    def _write_file(self, path: str, content: Pieces, allocate: Allocate | None) -> WrittenFile:
        if self._is_local:
            return write_file(Path(path), content, mode=FINISHED_MODE, allocate=allocate, sync_folder=False)
        # This is one call, which s3fs uploads in parallel parts and aborts if it fails.
        return hashed_while(lambda: self._fs.pipe_file(path, b"".join(content)), content)

    def _read_file(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None

    def _read_file_within(self, path: str, most_bytes: Mapping[str, int]) -> bytes | None:
        name = posixpath.basename(path)
        try:
            size = int(self._fs.size(path))
            if size > most_bytes[name]:
                raise FileTooLarge(name, size, most_bytes[name])
            # An object store returns an error for an empty range.
            return bytes(self._fs.cat_file(path, start=0, end=size)) if size else b""
        except FileNotFoundError:
            return None

    def _read_file_hashed(self, path: str, memory_for: MemoryFor, from_disk: bool) -> ReadFile | None:
        if not self._is_local:
            content = self._read_file(path)
            return None if content is None else ReadFile(content, sha256_of(content))
        try:
            return read_hashed(Path(path), memory_for, from_disk=from_disk)
        except FileNotFoundError:
            return None

    def _together(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call the function for each item: in sequence for a folder, in parallel for an object store."""
        if not self._fs.async_impl:
            return [function(item) for item in items]
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:
            return list(threads.map(function, items))


def driver_options(url: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return options that a driver does not read from the environment: botocore, for example, ignores AWS_REGION."""
    region = environment.get("AWS_REGION")
    return {"client_kwargs": {"region_name": region}} if region and url.startswith("s3://") else {}


def _fault(error: Exception) -> StorageFault:
    """Convert a driver's error. Drivers have different error classes.

    For example, botocore's errors are not OSErrors.
    """
    is_full = isinstance(error, OSError) and error.errno in NO_ROOM
    return StorageFault(_sentence(error), is_transient=_is_transient(error), is_full=is_full)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        advice = "" if isinstance(error, NoRoom) else ": delete checkpoints, or make room on its disk"
        return f"{error.strerror}{advice}"
    return str(error) or type(error).__name__


def _is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed later.

    Unknown errors count as transient, because the classes of network and server errors depend on the driver.
    """
    if isinstance(error, OSError):
        return error.errno not in PERMANENT_ERRNOS
    return not isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError)


def _sync_upwards(folder: Path, root: Path) -> None:
    for directory in (folder, *folder.parents):
        sync_directory(directory)
        if directory == root.parent:
            return
