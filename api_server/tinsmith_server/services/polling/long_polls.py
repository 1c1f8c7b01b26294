"""Long polls that can all be let go at once, when the server stops, and what many of them ask for at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


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


@dataclass(slots=True)
class _Shared(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SharedCalls(Generic[K, T]):
    """A call that many wait for is made once, and what it brings is there once, however large it is."""

    def __init__(self) -> None:
        self._running: dict[K, _Shared[T]] = {}

    async def result(self, key: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Of the call under way, or of a new one. It ends when nobody waits for it any more."""
        shared = self._running.get(key)
        if shared is None:
            shared = self._running[key] = _Shared(asyncio.create_task(call()))
            shared.task.add_done_callback(lambda _: self._forget(key, shared))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                self._forget(key, shared)
                shared.task.cancel()

    def _forget(self, key: K, shared: _Shared[T]) -> None:
        """Whoever comes from here on makes a call of its own."""
        if self._running.get(key) is shared:
            del self._running[key]
