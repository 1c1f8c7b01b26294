"""The rate limit of requests to the Kubernetes API, and the order of waiting requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

MOST_OVERTAKEN = 4
"""The largest number of requests that may overtake an older request.

Without a limit on overtaking, the status updates of 600 busy sessions kept all other requests waiting.
"""

WaiterT = TypeVar("WaiterT")


class Priority(IntEnum):
    """The priority of a waiting request.

    Reads and certificates come first, because decisions depend on them. Status updates, which users read, and deletes,
    which free resources, come second. Training progress is sent only while no other request waits.
    """

    ESSENTIAL = 0
    STATUS = 1
    DELETE = 2
    ORDINARY = 3
    PROGRESS = 4


@dataclass
class _Waiter(Generic[WaiterT]):
    waiter: WaiterT
    priority: Priority
    overtaken: int = 0


class RequestQueue(Generic[WaiterT]):
    """The waiting requests, in the order of their arrival.

    The next request is the oldest request of the highest priority. The oldest request of all comes next after
    `MOST_OVERTAKEN` requests have overtaken it. So a request waits for at most `MOST_OVERTAKEN` later requests.

    Training progress never overtakes, however long it waits. It is the next request only if no other request waits.
    """

    def __init__(self) -> None:
        self._waiters: list[_Waiter[WaiterT]] = []
        self._progress: list[_Waiter[WaiterT]] = []

    def __len__(self) -> int:
        return len(self._waiters) + len(self._progress)

    @property
    def holds_only_progress(self) -> bool:
        """True if no request waits except for training progress."""
        return not self._waiters and bool(self._progress)

    def join(self, waiter: WaiterT, priority: Priority) -> None:
        waiters = self._progress if priority is Priority.PROGRESS else self._waiters
        waiters.append(_Waiter(waiter, priority))

    def next(self) -> WaiterT:
        """Remove the next waiting request and return it."""
        if not self._waiters:
            return self._progress.pop(0).waiter
        taken = self._next_index()
        for older in self._waiters[:taken]:
            older.overtaken += 1
        return self._waiters.pop(taken).waiter

    def leave(self, waiter: WaiterT) -> None:
        """Remove a cancelled request if the request is still waiting."""
        self._waiters = [each for each in self._waiters if each.waiter is not waiter]
        self._progress = [each for each in self._progress if each.waiter is not waiter]

    def _next_index(self) -> int:
        # A request that overtakes a younger one also overtakes the oldest. So the oldest always has the highest count.
        if self._waiters[0].overtaken >= MOST_OVERTAKEN:
            return 0
        return min(range(len(self._waiters)), key=lambda index: (self._waiters[index].priority, index))


class RateLimit:
    """A token bucket that allows `burst` requests at once, and `per_second` requests a second over time."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at: float | None = None
        self._held_until = 0.0
        self._queue: RequestQueue[asyncio.Future[None]] = RequestQueue()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, priority: Priority = Priority.ORDINARY) -> None:
        """Return when a request of this priority may be sent."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.join(turn, priority)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.leave(turn)
            raise

    def hold(self, seconds: float) -> None:
        """Send no request for this number of seconds, because the API server asked for a pause."""
        self._held_until = max(self._held_until, asyncio.get_running_loop().time() + seconds)

    def _serve(self) -> None:
        """Give each token to a waiting request, and return the time of the next token."""
        self._refill()
        while len(self._queue) and self._tokens >= self._needed_tokens() and not self._is_held():
            turn = self._queue.next()
            # A cancelled request may still be in the queue.
            if not turn.done():
                self._tokens -= 1
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._queue):
            self._timer = asyncio.get_running_loop().call_at(self._next_token_at(), self._serve)

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        passed = 0.0 if self._filled_at is None else now - self._filled_at
        self._tokens = min(self._burst, self._tokens + passed * self._per_second)
        self._filled_at = now

    def _next_token_at(self) -> float:
        missing = max(0.0, self._needed_tokens() - self._tokens)
        # Wait slightly longer than computed. Because of rounding, the timer could otherwise fire before the token is
        # whole.
        token_at = asyncio.get_running_loop().time() + missing / self._per_second + 1e-6
        return max(self._held_until, token_at)

    def _needed_tokens(self) -> int:
        """Return the number of tokens at which the next request is sent.

        Training progress leaves a token, so that a request that comes after it is not delayed.
        """
        return min(2, self._burst) if self._queue.holds_only_progress else 1

    def _is_held(self) -> bool:
        return asyncio.get_running_loop().time() < self._held_until
