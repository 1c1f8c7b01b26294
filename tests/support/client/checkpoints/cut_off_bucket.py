"""An in-memory object store that accepts a given number of writes and deletes and then fails, as after a kill."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

PROTOCOL = "cutoff"


class Killed(BaseException):
    """The end of a program: the store sees nothing that happens after it."""


class CutOffBucket(MemoryFileSystem):  # type: ignore[misc]
    protocol = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left: ClassVar[int | None] = None
    """The operations that are left; None is unlimited."""

    @classmethod
    def empty(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.left = None

    def put_file(self, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().put_file(*arguments, **options)

    def pipe_file(self, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().pipe_file(*arguments, **options)

    def rm_file(self, path: str) -> None:
        self._count()
        super().rm_file(path)

    def _count(self) -> None:
        if CutOffBucket.left is None:
            return
        if CutOffBucket.left == 0:
            raise Killed
        CutOffBucket.left -= 1

    def rmdir(self, path: str) -> None:
        self._count()
        super().rmdir(path)


fsspec.register_implementation(PROTOCOL, CutOffBucket, clobber=True)
