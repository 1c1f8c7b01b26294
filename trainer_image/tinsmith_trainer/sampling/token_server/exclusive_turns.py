"""Work that must not be under way beside other work."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager


class Turns:
    """Lets in whatever bears those who are inside, first come, first served. One event loop's.

    `conflicts` says of each trait which other it does not bear, both ways.
    """

    def __init__(self, conflicts: Mapping[str, str]) -> None:
        self._conflicts = {**conflicts, **{conflict: trait for trait, conflict in conflicts.items()}}
        self._inside: Counter[str] = Counter()
        self._waiting: deque[tuple[Collection[str], asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, traits: Collection[str]) -> AsyncIterator[None]:
        await self._enter(traits)
        try:
            yield
        finally:
            self._leave(traits)

    async def _enter(self, traits: Collection[str]) -> None:
        if not traits or (not self._waiting and self._may_enter(traits)):
            self._inside.update(traits)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((traits, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # its turn came at the same moment
                self._leave(traits)
            else:
                self._admit()  # those behind it may have waited for it alone
            raise

    def _leave(self, traits: Collection[str]) -> None:
        self._inside.subtract(traits)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            traits, admitted = self._waiting[0]
            if admitted.done():  # who waited was cancelled
                self._waiting.popleft()
            elif self._may_enter(traits):
                self._waiting.popleft()
                self._inside.update(traits)
                admitted.set_result(None)
            else:
                return

    def _may_enter(self, traits: Collection[str]) -> bool:
        return not any(self._inside[self._conflicts[trait]] for trait in traits)
