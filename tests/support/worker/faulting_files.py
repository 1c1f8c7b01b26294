"""A file layer that loses what was not synced, as a power cut does; `kill -9` alone never loses the page cache.

Two halves. `LossyVfs` is an SQLite VFS that remembers each database file's content at its last sync.
`LossyFolders` watches `os.fsync`: it remembers a file's content when the file was synced, and a folder's
entries when the folder was. `image()` of either says what a disk would hold if the power went now; of both, if nothing
is synced between them: `with AT_ONE_MOMENT`.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

AT_ONE_MOMENT = threading.RLock()
"""Held while something becomes durable."""


class LossyVfs(apsw.VFS):
    """`Journal(path, vfs=name)` uses it after `lossy_vfs(name)`."""

    def __init__(self, name: str) -> None:
        self.syncs = 0
        self._synced: dict[Path, bytes] = {}
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> LossyFile:
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        self._synced.setdefault(path, path.read_bytes() if path.exists() else b"")
        return LossyFile(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self._synced.pop(Path(filename), None)

    def note_sync(self, path: Path) -> None:
        with AT_ONE_MOMENT:
            self.syncs += 1
            self._synced[path] = path.read_bytes()

    def image(self) -> dict[Path, bytes]:
        """Return the content of the disk."""
        return dict(self._synced)


class LossyFile(apsw.VFSFile):
    def __init__(self, vfs: LossyVfs, path: Path, name: Any, flags: list[int]) -> None:
        self._owner = vfs
        self._path = path
        super().__init__("", name, flags)

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._owner.note_sync(self._path)


@contextmanager
def lossy_vfs(name: str) -> Iterator[LossyVfs]:
    vfs = LossyVfs(name)
    try:
        yield vfs
    finally:
        vfs.unregister()


class LossyFolders:
    """The synced files below a root. The root itself is durable."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}  # by inode
        self._entries: dict[int, dict[str, int]] = {}  # a folder's inode: name to inode
        self._is_folder: dict[int, bool] = {root.stat().st_ino: True}
        # By inode: as long as it is open, no later file gets the number of one that was removed and may come back.
        self._held: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._held)
        self._real_fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        with AT_ONE_MOMENT:
            self._real_fsync(descriptor)
            self._note(descriptor)

    def _note(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(status.st_mode):
            found = list(os.scandir(path))
            self._entries[status.st_ino] = {entry.name: entry.inode() for entry in found}
            self._is_folder |= {entry.inode(): entry.is_dir() for entry in found}
            for entry in found:
                self._hold(entry)
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def _hold(self, entry: os.DirEntry[str]) -> None:
        if entry.inode() not in self._held:
            with suppress(FileNotFoundError):  # removed since
                self._held[entry.inode()] = os.open(entry.path, os.O_RDONLY)

    def image(self) -> dict[Path, bytes]:
        """Return the content of the disk: synced names only, and a file that was never synced is empty."""
        return dict(self._walk(self._root, self._root.stat().st_ino))

    def _walk(self, path: Path, inode: int) -> Iterator[tuple[Path, bytes]]:
        for name, child in self._entries.get(inode, {}).items():
            if self._is_folder[child]:
                yield from self._walk(path / name, child)
            else:
                yield path / name, self._contents.get(child, b"")


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def restore(image: dict[Path, bytes], source: Path, target: Path) -> None:
    """Lays an image of `source` out below `target`."""
    for path, content in image.items():
        if path.is_relative_to(source):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
