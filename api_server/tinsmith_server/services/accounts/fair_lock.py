"""One at a time, and tenants in turn: who has much to do waits for others as briefly as they wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
