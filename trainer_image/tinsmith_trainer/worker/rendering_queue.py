"""One text at a time is made into tokens, by turns of tenants: a long one takes a second, a flood of them minutes.

Python lets one thread run at a time anyhow, and the sampler's waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tinsmith_trainer.training.fair_shares import Shares

T = TypeVar("T")

BYTES_A_TOKEN = 4
"""What a turn is charged by, before anybody knows its tokens."""


class RenderingQueue:
    """Whoever has had least goes first. Of one event loop."""

    def __init__(self) -> None:
        self._shares = Shares[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_busy = False

    async def run(self, tenant: str, nbytes: int, render: Callable[[], T]) -> T:
        """What `render` returns of a text of so many bytes, in a thread. Raises what it does.

        Whoever gives up keeps the turn until the thread has ended: nothing stops a thread.
        """
        await self._wait(tenant)
        self._shares.charge(tenant, nbytes // BYTES_A_TOKEN + 1)
        rendering = asyncio.ensure_future(asyncio.to_thread(render))
        rendering.add_done_callback(self._end)
        return await asyncio.shield(rendering)

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._hand_over()
        try:
            await turn
        except asyncio.CancelledError:
            self._give_up(tenant, turn)
            raise

    def _hand_over(self) -> None:
        if self._is_busy or not self._waiting:
            return
        tenant = self._shares.next(self._waiting)
        turn = self._waiting[tenant][0]
        self._take_out(tenant, turn)
        turn.set_result(None)
        self._is_busy = True

    def _give_up(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """Whose task was cancelled, perhaps in the moment in which the turn became its own."""
        if turn.done() and not turn.cancelled():
            self._end(turn)
        else:
            self._take_out(tenant, turn)

    def _take_out(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]

    def _end(self, ended: asyncio.Future[T] | asyncio.Future[None]) -> None:
        if not ended.cancelled():
            ended.exception()  # whoever gave up does not ask for it
        self._is_busy = False
        self._hand_over()
