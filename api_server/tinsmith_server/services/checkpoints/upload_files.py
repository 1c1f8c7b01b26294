"""Files of adapters on their way in, below the checkpoint root: `uploads/<tenant>/<end>-<id>/<file>`.

The name of a directory says when its time is over, so that any replica can tell what nobody will finish any more, and
no row has to be kept of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import uuid
from datetime import datetime
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from tinsmith_server.services.checkpoints.files import FETCH_BYTES, CheckpointFiles, finish_file

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
