"""Admission of draws to the server. The number of draws on the server is limited and shared among tenants.

Further draws wait in this process for a turn.

A server serves requests in the order of arrival. So one tenant must leave rows for other tenants, and the next request
comes from the tenant with the least usage.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinsmith_trainer.sampling.tenant_shares import FairQueue, SharedQuota

CREDIT_TOKENS = 4096.0
"""The credit of a returning tenant: the cost of a few small requests."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    tokens: int
    admitted: asyncio.Future[None]


class Admission:
    """The draws of all tenants. Used on one event loop.

    A tenant may have as many draws on the server as remain free, so a single tenant may have half of `most`.
    """

    def __init__(self, most: int) -> None:
        self._room = SharedQuota(most)
        self._fair_queue = FairQueue(CREDIT_TOKENS)
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._draws: Counter[str] = Counter()  # includes waiting draws

    @asynccontextmanager
    async def turn(self, tenant: str, tokens: int) -> AsyncIterator[None]:
        """Wait for the turn of a draw. `tokens` is the maximum length of the prompt and the draw together."""
        if not self._draws[tenant]:
            self._fair_queue.enter(tenant)
        self._draws[tenant] += 1
        try:
            await self._enter(tenant, tokens)
            try:
                yield
            finally:
                self._room.give_back(tenant, 1)
        finally:
            self._draws[tenant] -= 1
            if not self._draws[tenant]:
                del self._draws[tenant]
                self._fair_queue.leave(tenant)
            self._admit()

    async def _enter(self, tenant: str, tokens: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(_Waiter(tokens, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # the turn came in the same moment as the cancellation
                self._room.give_back(tenant, 1)
            raise

    def _admit(self) -> None:
        while (tenant := self._next()) is not None:
            waiter = self._pop(tenant)
            if not waiter.admitted.done():  # otherwise the waiter was cancelled
                self._room.take(tenant, 1)
                self._fair_queue.charge(tenant, waiter.tokens)
                waiter.admitted.set_result(None)

    def _next(self) -> str | None:
        order = (tenant for tenant in self._fair_queue.order() if tenant in self._waiting)
        return next((tenant for tenant in order if self._room.fits(tenant, 1)), None)

    def _pop(self, tenant: str) -> _Waiter:
        waiter = self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return waiter
