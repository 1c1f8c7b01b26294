"""Where checkpoints lie: a directory of this machine, or a prefix on an object store; and how one becomes whole there.

In a directory of this machine a checkpoint is made beside the others, synced to the disk, and renamed. An object store
renames nothing: there `metadata.json` is written last, and removed first.
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
    """Directories of one level, by name. A whole one has a step's name and a `metadata.json`."""

    @property
    def url(self) -> str: ...

    def names(self) -> list[str]:
        """Of checkpoints, and of what cut-off writes and removals left; of nothing else that may lie there."""
        ...

    def files(self, name: str) -> Mapping[str, int]:
        """Sizes in bytes; empty where there is no such directory."""
        ...

    def open(self, name: str, file: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        ...

    def staging(self, step: int) -> Any:
        """A context with the empty folder of this machine in which a checkpoint is put together."""
        ...

    def publish(self, folder: Path, step: int) -> None:
        """Makes a whole checkpoint of a staged folder, in one moment. Nothing is at that step."""
        ...

    def replace(self, name: str, file: str, content: bytes) -> None:
        """A file that is there, in one moment: whoever reads it has the old or the new one."""
        ...

    def retire(self, name: str) -> str:
        """Makes a whole one not whole, in one moment. Returns under which name the rest is to be removed."""
        ...

    def remove(self, name: str) -> None: ...


def open_storage(url: str, **storage_options: Any) -> Storage:
    """A path, or any URL of fsspec; options go to its file system. Raises what fsspec raises for an unknown one."""
    filesystem, root = fsspec.core.url_to_fs(url, **storage_options)
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(Path(root))
    return BucketStorage(filesystem, root, url)


class LocalStorage:
    """On this machine."""

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
        """Beside the others: a rename does not leave its file system."""
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
    """A prefix of any file system that fsspec knows."""

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
        if (
            not self._filesystem.async_impl
        ):  # an object store has no folders, and to s3fs making one is making the bucket
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
        # Empty folders too, where there are folders.
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)

    def _listed(self, path: str) -> list[dict[str, Any]]:
        # Others may write there, and a listing that was kept would not show it.
        self._filesystem.invalidate_cache(path)
        try:
            return cast(list[dict[str, Any]], self._filesystem.ls(path, detail=True))
        except FileNotFoundError:
            return []

    def _path(self, *names: str) -> str:
        return posixpath.join(self._root, *names)


def _upload_order(path: Path) -> tuple[bool, bool, str]:
    """What says which state at the server is this checkpoint's goes first, and what makes it whole last."""
    return path.name == METADATA_FILE, path.name != TRAINER_STATE_FILE, path.name


def _stripped(listed: Mapping[str, Any]) -> str:
    return str(listed["name"]).rstrip("/")


def _is_checkpoint(name: str) -> bool:
    return step_of(name.removeprefix(WRITING).removeprefix(DELETED)) is not None


def _sync(path: Path) -> None:
    """Folders too: their entries are lost in a crash of the machine otherwise."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
