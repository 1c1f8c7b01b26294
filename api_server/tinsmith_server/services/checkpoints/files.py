"""The checkpoint root as the server sees it: list, read, copy and remove, on any fsspec URL. Workers write.

No file that has its final name is written into. A disk may have it under a second name, in another tenant's checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import posixpath
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tinsmith_server.errors import CheckpointRootUnavailable, StartupError

READ_BYTES = 2**20
FETCH_BYTES = 8 * READ_BYTES
"""What one request asks of an object store, and so what a download keeps in memory; s3fs would take 50 MiB."""
# The worker's own account of a checkpoint, which is no part of what was exported.
MANIFEST = "manifest.json"


class CheckpointFiles:
    """Blocking calls: run them in a thread. All paths are relative to the root.

    The constructor raises StartupError when there is no file system for the URL; calls raise
    CheckpointRootUnavailable when it refuses or cannot be reached, also when asked again.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._filesystem: Any
        try:
            # A listing that is remembered would hide what workers write.
            options = driver_options(url, os.environ)
            self._filesystem, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise StartupError(f"the checkpoint root cannot be opened: {error}") from error

    def list(self, directory: str) -> dict[str, int]:
        """Exported files below a directory, by relative path, with their sizes in bytes."""
        base = self._path(directory)
        with self.reaching():
            found = self._filesystem.find(base, detail=True)
        sizes = {posixpath.relpath(path, base): int(info["size"]) for path, info in found.items()}
        return {path: size for path, size in sizes.items() if path != MANIFEST}

    def read(self, directory: str, path: str) -> Iterator[bytes]:
        """Raises FileNotFoundError before the first part."""
        file = self._path(directory, path)
        with self.reaching():
            stream = self._filesystem.open(file, "rb", block_size=FETCH_BYTES)
        return self._parts(stream)

    def copy(self, source: str, target: str, names: Iterable[str]) -> None:
        """Copies files of a checkpoint into a new directory; durable when it returns. Raises FileNotFoundError.

        On a disk that can they are the same files under second names; an object store copies by itself. A name that is
        there already in `target` is refused.
        """
        with self.reaching():
            for name in names:
                self._copy_file(self._path(source, name), self._path(target, name))
            if isinstance(self._filesystem, LocalFileSystem):
                _sync_upwards(self._path(target), self._root)

    def _copy_file(self, path: str, target: str) -> None:
        if self._filesystem.async_impl:  # an object store has no folders, and to s3fs making one is making the bucket
            self._filesystem.cp_file(path, target)
            return
        self._filesystem.makedirs(posixpath.dirname(target), exist_ok=True)
        if not isinstance(self._filesystem, LocalFileSystem):
            self._filesystem.cp_file(path, target)
        elif not _link(path, target):
            _copy_durably(path, target)

    def remove(self, directory: str) -> None:
        """Removing what is gone already is fine, and so is what another server removes meanwhile."""
        path = self._path(directory)
        with contextlib.suppress(FileNotFoundError), self.reaching():
            self._filesystem.rm(path, recursive=True)

    @contextlib.contextmanager
    def reaching(self) -> Iterator[None]:
        """Drivers raise errors of their own: botocore's are no OSErrors."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CheckpointRootUnavailable(f"the checkpoint root {self._url} cannot be used: {error}") from error

    def _parts(self, stream: Any) -> Iterator[bytes]:
        with self.reaching(), stream:
            while part := stream.read(READ_BYTES):
                yield part

    def _path(self, *parts: str) -> str:
        relative = posixpath.normpath(posixpath.join(*parts))
        if relative.startswith(("/", "..")) or relative in {"", "."}:
            raise FileNotFoundError(f"{'/'.join(parts)} is outside the checkpoint root")
        return posixpath.join(self._root, relative)


def _link(path: str, target: str) -> bool:
    """Give the file a second name; False where the file system has none, as some of networks."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST):
            raise
        return False
    return True


def _copy_durably(path: str, target: str) -> None:
    written = temporary_name(target)
    shutil.copyfile(path, written)
    os.chmod(written, 0o444)
    finish_file(written, target)


def temporary_name(path: str) -> str:
    """Return a name beside `path` that no other attempt has."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")


def finish_file(written: str, path: str) -> None:
    """Give a file of the disk its final name, in the place of an earlier one; durable when it returns."""
    _sync(written)
    os.replace(written, path)
    _sync(posixpath.dirname(path))


def _sync_upwards(folder: str, root: str) -> None:
    """Make the names in a folder durable, and those of the folders that it is in, up to the root's."""
    while True:
        _sync(folder)
        if folder == root or folder == posixpath.dirname(folder):
            return
        folder = posixpath.dirname(folder)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def driver_options(url: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a driver does not find out by itself: botocore knows no AWS_REGION, which all else of AWS's goes by."""
    region = environment.get("AWS_REGION")
    return {"client_kwargs": {"region_name": region}} if region and url.startswith("s3://") else {}


AREA = "uploads"
# What is read in one part, and no file name that a worker looks for.
UNFINISHED = ".part-"


class UploadFiles(CheckpointFiles):
    """Blocking calls, like those of `CheckpointFiles`, which they raise like."""

    @staticmethod
    def new_directory(tenant: str, expires: datetime) -> str:
        """Of a name; it is made by the first file."""
        return f"{_area_of(tenant)}/{int(expires.timestamp())}-{uuid.uuid4().hex}"

    def others_of(self, tenant: str, directory: str) -> set[str]:
        """Directories of the tenant's uploads that have files, apart from this one."""
        return self._directories(_area_of(tenant)) - {directory}

    def open(self, directory: str, name: str) -> UploadedFile:
        return UploadedFile(self, self._filesystem, self._path(directory, name))

    def sweep(self, now: datetime) -> None:
        """Removes those whose time is over."""
        for directory in self._directories(AREA):
            end, _, _ = posixpath.basename(directory).partition("-")
            if end.isdecimal() and int(end) <= now.timestamp():
                self.remove(directory)

    def _directories(self, area: str) -> set[str]:
        with self.reaching():
            try:
                found = self._filesystem.find(self._path(area))
            except FileNotFoundError:
                return set()
        return {posixpath.relpath(posixpath.dirname(str(path)), self._root) for path in found}


class UploadedFile:
    """Being written: there as a whole once it is finished, and not at all before. Blocking calls, likewise."""

    def __init__(self, files: UploadFiles, filesystem: Any, path: str) -> None:
        self._files = files
        self._filesystem = filesystem
        self._path = path
        # An object is there when its upload has ended, and has no folder.
        self._is_object = filesystem.async_impl
        self._written = path if self._is_object else f"{path}{UNFINISHED}{uuid.uuid4().hex}"
        with files.reaching():
            if not self._is_object:
                filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
            self._file: Any = filesystem.open(self._written, "wb", block_size=FETCH_BYTES)

    def write(self, part: bytes) -> None:
        with self._files.reaching():
            self._file.write(part)

    def finish(self) -> None:
        with self._files.reaching():
            self._file.close()
            if isinstance(self._filesystem, LocalFileSystem):
                finish_file(self._written, self._path)
            elif not self._is_object:
                self._filesystem.mv(self._written, self._path)

    def give_up(self) -> None:
        """What cannot be removed now goes when the upload's time is over."""
        with contextlib.suppress(Exception):
            if self._is_object:
                self._file.discard()
                # It would be written once more when it is collected.
                self._file.closed = True
            else:
                self._file.close()
                self._filesystem.rm_file(self._written)
                # Where it was the only file; a folder that holds others stays.
                self._filesystem.rmdir(posixpath.dirname(self._written))


def _area_of(tenant: str) -> str:
    """A tenant's name may hold what no path may."""
    return f"{AREA}/{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"
