"""Long polls, and calls that several polls share. A stopping server releases long polls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import get_logger
from tinsmith_server.services.rows import RowCache

log = get_logger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Pending:
    """An answer that is not final. `paused` marks a reason that the user should know.

    `show_now` shows the reason to the user immediately. Without `show_now`, the SDK mentions a paused future only after
    a quarter of an hour.
    """

    reason: str | None = None
    paused: bool = False
    show_now: bool = False

    @classmethod
    def from_worker(cls, pending: worker_pb2.Pending) -> Pending:
        return cls(pending.reason or None, pending.paused_capacity)


STOPPING = Pending("the server is stopping")
FAILED = Pending("the server had an error and retries; see the server's log", paused=True)


# A program may poll hundreds of futures that wait for the same reason.
NOTICE_SECONDS = 60.0


class LongPolls:
    """The polls that are held. Thousands of polls may be held."""

    def __init__(self, hold_seconds: float) -> None:
        self._hold_seconds = hold_seconds
        self._held: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._noticed: RowCache[str, bool] = RowCache(NOTICE_SECONDS)

    def __len__(self) -> int:
        return len(self._held)

    async def hold(self, work: Coroutine[Any, Any, T], released: T) -> T:
        """Return the result of the work, or `released` after a call of `release`."""
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

    def with_notice(self, answer: Pending, owner: str) -> Pending:
        """Show the reason of a paused future to the user, once in NOTICE_SECONDS for each owner.

        The owner is a model, a sampling session or a client.
        """
        if not answer.paused or answer.reason is None or self._noticed.get(owner):
            return answer
        self._noticed.put(owner, True)
        return replace(answer, show_now=True)

    async def hold_failure(
        self, call: Callable[[], Awaitable[T]], is_final: Callable[[Exception], bool]
    ) -> T | Pending:
        """Return the result of the call. If a failure is not final, return Pending after a full hold.

        After a 5xx, the SDK would repeat the poll immediately, some hundreds of times a second for each future.
        """
        clock = asyncio.get_running_loop().time
        hold_until = clock() + self._hold_seconds
        try:
            return await call()
        except Exception as error:
            if is_final(error):
                raise
            answer = FAILED
            if isinstance(error, TinsmithError):
                log.warning("poll failed", reason=str(error))
                answer = Pending(str(error), paused=True)
            else:
                log.exception("poll failed")
            return await self.hold(asyncio.sleep(hold_until - clock(), answer), released=STOPPING)

    def release(self) -> None:
        self._closed = True
        for task in list(self._held):
            task.cancel()


@dataclass(slots=True)
class _Shared(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SharedCalls(Generic[K, T]):
    """Calls that several callers share. Each call is made once, and its result is in memory once."""

    def __init__(self) -> None:
        self._running: dict[K, _Shared[T]] = {}

    async def result(self, key: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running call, or of a new call.

        The call is cancelled when no caller waits any more.
        """
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
        """Forget the call, so that a later caller makes a new call."""
        if self._running.get(key) is shared:
            del self._running[key]
