"""Long polls that can all be let go at once, when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LongPolls:
    """Thousands may be held; letting go costs nothing until it happens."""

    def __init__(self) -> None:
        self._held: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    async def hold(self, work: Coroutine[Any, Any, T], released: T) -> T:
        """The work's result, or `released` once `release` was called."""
        if self._closed:
            work.close()
            return released
        task = asyncio.create_task(work)
        self._held.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._closed or not task.cancelled():
                raise
            return released
        finally:
            self._held.discard(task)
            task.cancel()

    def release(self) -> None:
        self._closed = True
        for task in list(self._held):
            task.cancel()
