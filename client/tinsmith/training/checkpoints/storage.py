"""Storage of checkpoints, in a local directory or below a prefix in an object store.

In a local directory, a checkpoint is made in a temporary directory, synced to disk, and renamed. An object store cannot
rename. In an object store, `metadata.json` is written last and removed first.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tinsmith.training.checkpoints.metadata import METADATA_FILE, TRAINER_STATE_FILE, directory_name, step_of

WRITING, DELETED = ".writing-", ".deleted-"


class Storage(Protocol):
    """A storage that consists of named directories on one level.

    A complete checkpoint has the name of a step, and a `metadata.json`.
    """

    @property
    def url(self) -> str: ...

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, and of directories that interrupted writes and removals have left.

        Names of other files and directories are left out.
        """
        ...

    def files(self, name: str) -> Mapping[str, int]:
        """Return the sizes of the files. For a missing directory, the result is empty."""
        ...

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file. Raises FileNotFoundError."""
        ...

    def staging(self, step: int) -> Any:
        """Return a context with an empty local folder. The caller prepares a checkpoint in this folder."""
        ...

    def publish(self, folder: Path, step: int) -> None:
        """Turn a prepared folder into a complete checkpoint, in one step.

        A checkpoint with this name must not exist yet.
        """
        ...

    def replace(self, name: str, file: str, content: bytes) -> None:
        """Replace a file in one step, so that a reader sees either the old content or the new content."""
        ...

    def retire(self, name: str) -> str:
        """Turn a complete checkpoint into an incomplete checkpoint, in one step.

        Return the name of the directory to remove.
        """
        ...

    def remove(self, name: str) -> None: ...


def open_storage(url: str, **storage_options: Any) -> Storage:
    """Open a path or an fsspec URL. The options are passed to the file system.

    Raises fsspec's error for an unknown option.
    """
    filesystem, root = fsspec.core.url_to_fs(url, **storage_options)
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(Path(root))
    return BucketStorage(filesystem, root, url)


class LocalStorage:
    """Storage in a local directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def names(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if path.is_dir() and _is_checkpoint(path.name))

    def files(self, name: str) -> Mapping[str, int]:
        folder = self._root / name
        if not folder.is_dir():
            return {}
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}

    def open(self, name: str, file: str) -> BinaryIO:
        return (self._root / name / file).open("rb")

    @contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        """Use a temporary folder next to the checkpoints, because a rename works only within one file system."""
        folder = self._root / f"{WRITING}{directory_name(step)}"
        self.remove(folder.name)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            self.remove(folder.name)

    def publish(self, folder: Path, step: int) -> None:
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        folder.rename(self._root / directory_name(step))
        _sync(self._root)

    def replace(self, name: str, file: str, content: bytes) -> None:
        written = self._root / name / f"{WRITING}{file}"
        try:
            written.write_bytes(content)
            _sync(written)
            written.rename(self._root / name / file)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
        _sync(self._root / name)

    def retire(self, name: str) -> str:
        retired = f"{DELETED}{name}"
        self.remove(retired)
        (self._root / name).rename(self._root / retired)
        _sync(self._root)
        return retired

    def remove(self, name: str) -> None:
        if (self._root / name).is_dir():
            shutil.rmtree(self._root / name)


class BucketStorage:
    """Storage below a prefix of any fsspec file system."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def names(self) -> list[str]:
        return sorted(filter(_is_checkpoint, map(posixpath.basename, map(_stripped, self._listed(self._root)))))

    def files(self, name: str) -> Mapping[str, int]:
        found = self._listed(self._path(name))
        return {posixpath.basename(entry["name"]): int(entry["size"]) for entry in found if entry["type"] == "file"}

    def open(self, name: str, file: str) -> BinaryIO:
        return cast(BinaryIO, self._filesystem.open(self._path(name, file), "rb"))

    @contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=f"{directory_name(step)}-") as folder:
            yield Path(folder)

    def publish(self, folder: Path, step: int) -> None:
        name = directory_name(step)
        if not self._filesystem.async_impl:  # an object store has no folders, and s3fs would create the bucket
            self._filesystem.makedirs(self._path(name), exist_ok=True)
        for path in sorted(folder.iterdir(), key=_upload_order):
            self._filesystem.put_file(str(path), self._path(name, path.name))

    def replace(self, name: str, file: str, content: bytes) -> None:
        self._filesystem.pipe_file(self._path(name, file), content)

    def retire(self, name: str) -> str:
        self._filesystem.rm_file(self._path(name, METADATA_FILE))
        return name

    def remove(self, name: str) -> None:
        path = self._path(name)
        self._filesystem.invalidate_cache(path)
        # Also removes empty folders on file systems that have folders.
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)

    def _listed(self, path: str) -> list[dict[str, Any]]:
        # Another process may write there, which a cached listing would not show.
        self._filesystem.invalidate_cache(path)
        try:
            return cast(list[dict[str, Any]], self._filesystem.ls(path, detail=True))
        except FileNotFoundError:
            return []

    def _path(self, *names: str) -> str:
        return posixpath.join(self._root, *names)


def _upload_order(path: Path) -> tuple[bool, bool, str]:
    """Return a sort key.

    The file that names the server's state comes first, and the file that completes the checkpoint comes last.
    """
    return path.name == METADATA_FILE, path.name != TRAINER_STATE_FILE, path.name


def _stripped(listed: Mapping[str, Any]) -> str:
    return str(listed["name"]).rstrip("/")


def _is_checkpoint(name: str) -> bool:
    return step_of(name.removeprefix(WRITING).removeprefix(DELETED)) is not None


def _sync(path: Path) -> None:
    """Sync a file or folder. Without a sync, a crash of the machine could lose the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
