"""Long polls that can all be let go at once, when the server stops, and what many of them ask for at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Pending:
    """Not yet. `paused`: something is in the way that a human will want to hear of.

    `told`: at once, since somebody waits and sees nothing; of what is paused the SDK says nothing for a quarter of an
    hour.
    """

    reason: str | None = None
    paused: bool = False
    told: bool = False

    @classmethod
    def from_worker(cls, pending: worker_pb2.Pending) -> Pending:
        return cls(pending.reason or None, pending.paused_capacity)


STOPPING = Pending("the server is stopping")
FAILED = Pending("the server has met an error and tries again; its log says which", paused=True)


class LongPolls:
    """Thousands may be held; letting go costs nothing until it happens."""

    def __init__(self, hold_seconds: float) -> None:
        self._hold_seconds = hold_seconds
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

    async def hold_failure(
        self, call: Callable[[], Awaitable[T]], is_final: Callable[[Exception], bool]
    ) -> T | Pending:
        """Return the call's result. A failure that is not final becomes Pending, after a full hold.

        The SDK repeats a poll that got a 5xx at once, some hundreds of times a second per future.
        """
        clock = asyncio.get_running_loop().time
        hold_until = clock() + self._hold_seconds
        try:
            return await call()
        except Exception as error:
            if is_final(error):
                raise
            if isinstance(error, TinsmithError):
                log.warning("poll failed", reason=str(error))
            else:
                log.exception("poll failed")
            return await self.hold(asyncio.sleep(hold_until - clock(), FAILED), released=STOPPING)

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
