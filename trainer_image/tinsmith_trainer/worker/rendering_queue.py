"""A queue that renders prompts one at a time, with fair shares for tenants.

Rendering a long text takes a second. Rendering several texts at once would not be faster, because Python runs one
thread at a time. With several threads, the sampler's thread would also have to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tinsmith_trainer.training.fair_shares import Shares

T = TypeVar("T")

BYTES_A_TOKEN = 4
"""The number of bytes that count as one token, for a text before its tokens are known."""


class RenderingQueue:
    """The queue of texts to render. The tenant with the least usage is next. Used on one event loop."""

    def __init__(self) -> None:
        self._shares = Shares[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_busy = False

    async def run(self, tenant: str, nbytes: int, render: Callable[[], T]) -> T:
        """Run `render` in a thread, and return the result. Raises the errors of `render`.

        `nbytes` is the size of the text. If a caller is cancelled, the turn lasts until the thread ends, because a
        thread cannot be stopped.
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
        """Give up a turn after a cancellation. A cancellation may also come at the moment when the turn begins."""
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
            ended.exception()  # a cancelled caller does not retrieve the exception
        self._is_busy = False
        self._hand_over()
