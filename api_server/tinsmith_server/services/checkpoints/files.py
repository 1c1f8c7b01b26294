"""Operations on the files of the checkpoint root, which may be any fsspec URL: list, read, copy, remove and upload.

A file with its final name is never changed, because it may be a hard link to a file of another tenant's checkpoint.
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
"""The size of one request to an object store.

A download holds this number of bytes in memory. The default of s3fs is 50 MiB.
"""
# The worker's own description of a checkpoint, which is not exported.
MANIFEST = "manifest.json"


class CheckpointFiles:
    """The checkpoint root. All paths are relative to the checkpoint root. Calls block: run them in a thread.

    The constructor raises StartupError if no file system supports the URL. Calls raise CheckpointRootUnavailable if the
    file system refuses the call, or cannot be reached even after a retry.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._filesystem: Any
        try:
            # A cached listing would hide what workers write.
            options = driver_options(url, os.environ)
            self._filesystem, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise StartupError(f"the checkpoint root cannot be opened: {error}") from error

    def list(self, directory: str) -> dict[str, int]:
        """Return the sizes in bytes of the exported files below a directory, by relative path."""
        base = self._path(directory)
        with self.reaching():
            found = self._filesystem.find(base, detail=True)
        sizes = {posixpath.relpath(path, base): int(info["size"]) for path, info in found.items()}
        return {path: size for path, size in sizes.items() if path != MANIFEST}

    def read(self, directory: str, path: str) -> Iterator[bytes]:
        """Yield the file's parts. Raises FileNotFoundError before the first part."""
        file = self._path(directory, path)
        with self.reaching():
            stream = self._filesystem.open(file, "rb", block_size=FETCH_BYTES)
        return self._parts(stream)

    def copy(self, source: str, target: str, names: Iterable[str]) -> None:
        """Copy files of a checkpoint into a new directory. The copy is durable on return. Raises FileNotFoundError.

        A local file system makes hard links, if possible. An object store copies the objects itself. A name that
        already exists in `target` is refused.
        """
        with self.reaching():
            for name in names:
                self._copy_file(self._path(source, name), self._path(target, name))
            if isinstance(self._filesystem, LocalFileSystem):
                _sync_upwards(self._path(target), self._root)

    def _copy_file(self, path: str, target: str) -> None:
        if self._filesystem.async_impl:  # an object store has no folders, and s3fs would create a bucket
            self._filesystem.cp_file(path, target)
            return
        self._filesystem.makedirs(posixpath.dirname(target), exist_ok=True)
        if not isinstance(self._filesystem, LocalFileSystem):
            self._filesystem.cp_file(path, target)
        elif not _link(path, target):
            _copy_durably(path, target)

    def remove(self, directory: str) -> None:
        """Remove a directory, if it exists. Another server may remove the directory at the same time."""
        path = self._path(directory)
        with contextlib.suppress(FileNotFoundError), self.reaching():
            self._filesystem.rm(path, recursive=True)

    @contextlib.contextmanager
    def reaching(self) -> Iterator[None]:
        """Translate the drivers' errors. The errors of botocore are not OSErrors."""
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
    """Make a hard link to the file. Returns False if the file system does not support hard links."""
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
    """Return a name in the folder of `path` that no other attempt uses."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")


def finish_file(written: str, path: str) -> None:
    """Give a file on disk its final name, and replace an earlier file of this name. The name is durable on return."""
    _sync(written)
    os.replace(written, path)
    _sync(posixpath.dirname(path))


def _sync_upwards(folder: str, root: str) -> None:
    """Make the names in a folder durable, and also the names in all parent folders up to the root."""
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
    """Return the options that a driver does not read from the environment. For example, botocore ignores AWS_REGION."""
    region = environment.get("AWS_REGION")
    return {"client_kwargs": {"region_name": region}} if region and url.startswith("s3://") else {}


AREA = "uploads"
# A name that counts as one path segment, and that no worker uses.
UNFINISHED = ".part-"


class UploadFiles(CheckpointFiles):
    """The uploaded files. Calls block, and raise the errors of `CheckpointFiles`."""

    @staticmethod
    def new_directory(tenant: str, expires: datetime) -> str:
        """Return the name of a new directory. The first file creates the directory."""
        return f"{_area_of(tenant)}/{int(expires.timestamp())}-{uuid.uuid4().hex}"

    def others_of(self, tenant: str, directory: str) -> set[str]:
        """Return the tenant's other upload directories that contain files."""
        return self._directories(_area_of(tenant)) - {directory}

    def open(self, directory: str, name: str) -> UploadedFile:
        return UploadedFile(self, self._filesystem, self._path(directory, name))

    def sweep(self, now: datetime) -> None:
        """Remove expired uploads."""
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
    """A file that is being written. The file gets its final name only when it is finished. Calls block."""

    def __init__(self, files: UploadFiles, filesystem: Any, path: str) -> None:
        self._files = files
        self._filesystem = filesystem
        self._path = path
        # An object needs no folder, and exists only after its upload has ended.
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
        """Remove the file. If the removal fails, the file is removed when the upload expires."""
        with contextlib.suppress(Exception):
            if self._is_object:
                self._file.discard()
                # Without this, the garbage collector would close the file, and so write it again.
                self._file.closed = True
            else:
                self._file.close()
                self._filesystem.rm_file(self._written)
                # Remove the folder if it is empty. A folder with other files stays.
                self._filesystem.rmdir(posixpath.dirname(self._written))


def _area_of(tenant: str) -> str:
    """Return the directory of a tenant. The tenant's name may contain characters that are not allowed in a path."""
    return f"{AREA}/{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"
