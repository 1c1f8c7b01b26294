"""The checkpoint root as the server sees it: list, read and remove, on any fsspec URL. Workers write."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import Any

import fsspec

from tinsmith_server.errors import StartupError

READ_BYTES = 2**20
# The worker's own account of a checkpoint, which is no part of what was exported.
MANIFEST = "manifest.json"


class CheckpointFiles:
    """Blocking calls: run them in a thread. All paths are relative to the root.

    Raises StartupError from the constructor when fsspec has no file system for the URL.
    """

    def __init__(self, url: str) -> None:
        self._filesystem: Any
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StartupError(f"the checkpoint root cannot be opened: {error}") from error

    def list(self, directory: str) -> dict[str, int]:
        """Exported files below a directory, by relative path, with their sizes in bytes."""
        base = self._path(directory)
        found = self._filesystem.find(base, detail=True)
        sizes = {posixpath.relpath(path, base): int(info["size"]) for path, info in found.items()}
        return {path: size for path, size in sizes.items() if path != MANIFEST}

    def read(self, directory: str, path: str) -> Iterator[bytes]:
        """Raises FileNotFoundError before the first part."""
        stream = self._filesystem.open(self._path(directory, path), "rb")
        return self._parts(stream)

    def remove(self, directory: str) -> None:
        """Removing what is gone already is fine."""
        path = self._path(directory)
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)

    @staticmethod
    def _parts(stream: Any) -> Iterator[bytes]:
        with stream:
            while part := stream.read(READ_BYTES):
                yield part

    def _path(self, *parts: str) -> str:
        relative = posixpath.normpath(posixpath.join(*parts))
        if relative.startswith(("/", "..")) or relative in {"", "."}:
            raise FileNotFoundError(f"{'/'.join(parts)} is outside the checkpoint root")
        return posixpath.join(self._root, relative)
