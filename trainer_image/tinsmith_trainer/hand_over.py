"""When a sampler that takes no more samples may go: everything that it took is done, and was fetched."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

UNFETCHED_SECONDS = 60.0
"""How long results wait for somebody to fetch them. A client that lives asks again every 25 s."""


class HandOver:
    """The samples that somebody may still come for. One event loop's, whose clock it reads unless given another."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._unfinished: set[str] = set()
        self._unfetched: set[str] = set()
        self._last_finish = -math.inf
        self._changed = asyncio.Event()

    def took(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def finished(self, request_id: str) -> None:
        """From now on there is a result to fetch."""
        self._unfinished.discard(request_id)
        self._unfetched.add(request_id)
        self._last_finish = self._clock()
        self._changed.set()

    def settled(self, request_id: str) -> None:
        """Its result was fetched, or nobody will ever want it."""
        self._unfetched.discard(request_id)
        self._changed.set()

    def lost(self, request_id: str) -> None:
        """There will be no result."""
        self._unfinished.discard(request_id)
        self.settled(request_id)

    def remaining_seconds(self) -> float:
        """How much longer this process is needed: 0: no more; infinite while a sample runs."""
        if self._unfinished:
            return math.inf
        if not self._unfetched:
            return 0.0
        return max(0.0, self._last_finish + UNFETCHED_SECONDS - self._clock())

    async def complete(self) -> None:
        """Returns when the process may go. Samples that are taken meanwhile are waited for, too."""
        while (remaining := self.remaining_seconds()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if math.isinf(remaining) else remaining):
                    await self._changed.wait()
            except TimeoutError:
                continue
