"""Files that are either whole or absent after a power cut: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Creates a folder and its missing parents; their names survive a power cut."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def write_file(path: Path, content: bytes, *, before_rename: Callable[[], None] | None = None) -> None:
    """Writes and syncs `content` under `path`; until the last moment the name shows the old file or none."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if before_rename is not None:
        before_rename()
    temporary.replace(path)
    sync_directory(path.parent)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
