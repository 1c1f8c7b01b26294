"""Fair sharing of the server between tenants: slots of the event loop, and a lock.

An event loop runs all ready steps in the order of arrival. If one tenant has hundreds of requests in the loop, each
step of another tenant's request waits for hundreds of steps.
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
# In each of its steps, a request waits for at most this many requests of another tenant.
SLOTS_WHILE_SHARED = 2
# A tenant counts as active for this long after its latest request.
SHARED_SECONDS = 1.0
# A request that takes longer does not use the event loop: it waits for a body, a worker, or a lock.
LONGEST_SECONDS = 0.1


class RequestSlots:
    """The slots of the event loop. Each tenant has its own queue, in the order of arrival."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._latest, self._latest_at, self._shared_until = "", -math.inf, -math.inf

    def __len__(self) -> int:
        """Return the number of slots in use."""
        return self._taken.total()

    @asynccontextmanager
    async def slot(self, tenant: str, *, is_other: bool = True, may_wait: bool = True) -> AsyncIterator[None]:
        """Hold a slot of the tenant until the end of the context, but not longer than the time limit of a slot.

        If `may_wait` is False, the slot is freed as soon as the request waits. If `is_other` is False, as for health
        probes, the request does not reduce other tenants' slots.
        """
        if is_other:
            self._note(tenant)
        await self._take(tenant)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._longest_seconds if may_wait else 0, self._leave, tenant)
        try:
            # This step returns to the event loop. Without it, requests that never wait would all run in one step, and
            # no slot would ever be missing.
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
                # The slot was granted just before the cancellation.
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
            self._shared_until = now + SHARED_SECONDS
        self._latest, self._latest_at = tenant, now

    def _places(self, tenant: str) -> int:
        """Return how many slots the tenant has.

        Addresses without a key are not tenants, but share the slots with the tenants.
        """
        now = self._clock()
        is_other_than_latest = tenant != self._latest and now < self._latest_at + SHARED_SECONDS
        return SLOTS_WHILE_SHARED if is_other_than_latest or now < self._shared_until else SLOTS_ALONE


class FairLock:
    """A lock that tenants get in turn. The lock protects work that must run one call at a time."""

    def __init__(self) -> None:
        self._busy = False
        # The tenants in the order of their turns. After its turn, a tenant moves to the end.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """Hold the lock until the end of the context."""
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
                # The lock was granted just before the cancellation.
                self._next()
            raise

    def _next(self) -> None:
        """Pass the lock to the next tenant. The lock never counts as free between two holders."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
