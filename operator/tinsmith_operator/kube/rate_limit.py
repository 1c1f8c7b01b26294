"""How many requests a second the operator allows itself, and which go first when they must queue."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from enum import IntEnum


class Priority(IntEnum):
    """What must not wait behind a burst of creations goes first: what people read, and what frees something."""

    STATUS = 0
    DELETE = 1
    ORDINARY = 2


class RateLimit:
    """A token bucket: `burst` requests at once, `per_second` over time."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at: float | None = None
        self._held_until = 0.0
        self._queue: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, priority: Priority = Priority.ORDINARY) -> None:
        """Until a request of this priority may be sent."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), turn))
        self._serve()
        await turn

    def hold(self, seconds: float) -> None:
        """Sends nothing for so long: the API server asked for it."""
        self._held_until = max(self._held_until, asyncio.get_running_loop().time() + seconds)

    def _serve(self) -> None:
        """Lets go whoever has a token, and comes back when there is the next one."""
        self._refill()
        self._drop_cancelled()
        while self._queue and self._tokens >= 1 and not self._is_held():
            self._tokens -= 1
            heapq.heappop(self._queue)[2].set_result(None)
            self._drop_cancelled()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue:
            self._timer = asyncio.get_running_loop().call_at(self._next_token_at(), self._serve)

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        passed = 0.0 if self._filled_at is None else now - self._filled_at
        self._tokens = min(self._burst, self._tokens + passed * self._per_second)
        self._filled_at = now

    def _next_token_at(self) -> float:
        missing = max(0.0, 1 - self._tokens)
        # A hair later than the arithmetic says, or rounding makes a timer that finds no whole token.
        token_at = asyncio.get_running_loop().time() + missing / self._per_second + 1e-6
        return max(self._held_until, token_at)

    def _is_held(self) -> bool:
        return asyncio.get_running_loop().time() < self._held_until

    def _drop_cancelled(self) -> None:
        while self._queue and self._queue[0][2].done():
            heapq.heappop(self._queue)
