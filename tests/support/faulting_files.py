"""A file layer that loses what was not synced, as a power cut does; `kill -9` alone never loses the page cache.

`LossyVfs` is an SQLite VFS: it passes reads and writes through and remembers, per file, the content at
the last sync. `power_cut()` puts every file back to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw


class LossyVfs(apsw.VFS):
    """Register under a name of its own; `Journal(path, vfs=name)` uses it."""

    def __init__(self, name: str) -> None:
        self.syncs = 0
        self.synced: dict[Path, bytes] = {}
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> LossyFile:
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        self.synced.setdefault(path, path.read_bytes() if path.exists() else b"")
        return LossyFile(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.synced.pop(Path(filename), None)

    def power_cut(self) -> None:
        """What the disk holds when everything that was not synced is gone."""
        for path, content in self.synced.items():
            path.write_bytes(content)


class LossyFile(apsw.VFSFile):
    def __init__(self, vfs: LossyVfs, path: Path, name: Any, flags: list[int]) -> None:
        self._owner = vfs
        self._path = path
        super().__init__("", name, flags)

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._owner.syncs += 1
        self._owner.synced[self._path] = self._path.read_bytes()


@contextmanager
def lossy_vfs(name: str) -> Iterator[LossyVfs]:
    vfs = LossyVfs(name)
    try:
        yield vfs
    finally:
        vfs.unregister()
