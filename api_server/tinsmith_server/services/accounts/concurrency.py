"""How many requests of one tenant are worked on at the same time.

An event loop serves what is ready in the order in which it came. With hundreds of one tenant's requests in it, each
step of another's would wait for a step of all of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

# Enough to keep the processor, the store and the workers busy at the same time.
SLOTS_ALONE = 16
# Another one's request waits for so many of them, in each step that it takes.
SLOTS_WHILE_SHARED = 2
# After its latest request a tenant still counts as one of the others.
SHARED_SECONDS = 1.0
# A request that is not done by then waits for something else: a body, a worker, its turn.
LONGEST_SECONDS = 0.1


class RequestSlots:
    """The others wait in the order in which they came, and each tenant's apart from all others'."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._latest, self._latest_at, self._beside_until = "", -math.inf, -math.inf

    def __len__(self) -> int:
        """Places that are taken now."""
        return self._taken.total()

    @asynccontextmanager
    async def slot(self, tenant: str, *, is_other: bool = True, may_wait: bool = True) -> AsyncIterator[None]:
        """One of the tenant's, until the end, or for as long as a request may have one.

        `may_wait` False: until it waits for anything. `is_other` False: nobody has fewer places for it, as for probes
        of the server's health.
        """
        if is_other:
            self._note(tenant)
        await self._take(tenant)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._longest_seconds if may_wait else 0, self._leave, tenant)
        try:
            # One that waits for nothing would be done before its place could be missed: all that are there would be
            # done in one step.
            await asyncio.sleep(0)
            yield
        finally:
            if timer.when() > loop.time():
                timer.cancel()
                self._leave(tenant)

    async def _take(self, tenant: str) -> None:
        if self._taken[tenant] < self._places(tenant):
            self._taken[tenant] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was handed over in the moment in which its owner gave up.
                self._leave(tenant)
            raise

    def _leave(self, tenant: str) -> None:
        self._taken[tenant] -= 1
        waiting = self._waiting.get(tenant, deque())
        while waiting and self._taken[tenant] < self._places(tenant):
            turn = waiting.popleft()
            if not turn.done():
                self._taken[tenant] += 1
                turn.set_result(None)
        if not waiting:
            self._waiting.pop(tenant, None)
        if not self._taken[tenant]:
            del self._taken[tenant]

    def _note(self, tenant: str) -> None:
        now = self._clock()
        if tenant != self._latest and now < self._latest_at + SHARED_SECONDS:
            self._beside_until = now + SHARED_SECONDS
        self._latest, self._latest_at = tenant, now

    def _places(self, tenant: str) -> int:
        """Those that are nobody's others, as addresses without a key, have others themselves."""
        now = self._clock()
        beside_the_latest = tenant != self._latest and now < self._latest_at + SHARED_SECONDS
        return SLOTS_WHILE_SHARED if beside_the_latest or now < self._beside_until else SLOTS_ALONE


class FairLock:
    """For work that two should not do at once, such as what Python lets only one thread do."""

    def __init__(self) -> None:
        self._busy = False
        # Tenants in the order in which they come; who has had a turn goes to the end.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """A turn, given back at the end."""
        if self._busy:
            await self._wait(tenant)
        self._busy = True
        try:
            yield
        finally:
            self._next()

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was handed over in the moment in which its owner gave up.
                self._next()
            raise

    def _next(self) -> None:
        """Hands the turn over without a moment in which it looks free."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            lock = self._waiting.pop(tenant)
            turn = lock.popleft()
            if lock:
                self._waiting[tenant] = lock
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
