"""A real file system of some megabytes, of which every byte that is left behind is missed.

It is a tmpfs in a mount namespace that one thread has for itself, with all threads and processes that it starts.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from support.requirements import require

T = TypeVar("T")

CLONE_NEWNS = 0x00020000
MIB = 1024**2


class SmallDisk:
    """The mounted folder; other files on it are one ballast."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self, *, leaving_bytes: int = 0) -> None:
        """Fill the disk, as another program does."""
        with self._ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, file.tell() + self.free_bytes - leaving_bytes)
            file.seek(0, os.SEEK_END)

    def make_room(self) -> None:
        self._ballast.unlink()

    def leftovers(self) -> list[str]:
        """Names of half-written files."""
        return sorted(path.name for path in self.folder.rglob("*.tmp"))


def on_small_disk(folder: Path, size_mib: int, scenario: Callable[[SmallDisk], Awaitable[T]]) -> T:
    """Run it in an event loop of its own, with the disk mounted at `folder`.

    Skips the test where mounting is impossible.
    """
    return _on_disk(folder, ["-t", "tmpfs", "-o", f"size={size_mib}m"], scenario)


def on_disk_without_size(folder: Path, scenario: Callable[[SmallDisk], Awaitable[T]]) -> T:
    """Run it on a ramfs: it states neither its size nor its free space, and allocates no blocks ahead of writes."""
    return _on_disk(folder, ["-t", "ramfs"], scenario)


def _on_disk(folder: Path, options: list[str], scenario: Callable[[SmallDisk], Awaitable[T]]) -> T:
    def live() -> T:
        _mount(folder, options)
        return asyncio.run(scenario(SmallDisk(folder)))  # type: ignore[arg-type]

    require(
        os.geteuid() == 0,
        "a small disk needs root, or `unshare --map-root-user --mount .venv/bin/pytest …`",
    )
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(live).result()


def _mount(folder: Path, options: list[str]) -> None:
    """Gone with the last thread and process that sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    require(libc.unshare(CLONE_NEWNS) == 0, "a small disk needs a mount namespace: run as root, with CAP_SYS_ADMIN")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", *options, "none", str(folder)], check=True)
