"""Which keys are to be worked on: each once however often it was asked for, and never twice at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 300.0
# Retries of many keys that failed together must not come back together.
JITTER = 0.25


class WorkQueue(Generic[KeyT]):
    """A key is waiting, running, both (it was asked for again while it ran), or due at some later time. One that is
    held is due at its time, and no sooner.

    Used from one event loop; its clock is the loop's.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self._waiting: dict[KeyT, None] = {}
        self._running: set[KeyT] = set()
        self._held: set[KeyT] = set()
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        self._failures: dict[KeyT, int] = {}
        self._chance = chance or random.Random()
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """Keys that wait for their turn now."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, key: KeyT) -> None:
        """As soon as possible. A key that is running runs once more afterwards."""
        if key in self._held:
            return
        self._cancel_timer(key)
        self._waiting[key] = None
        self._changed.set()

    def add_after(self, key: KeyT, seconds: float) -> None:
        """No later than this. An earlier time that was asked for stays."""
        if key in self._waiting or key in self._held:
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_later(seconds, self.add, key)

    def retry(self, key: KeyT, at_least_seconds: float = 0.0) -> float:
        """After a failure: later each time, with jitter. Returns the seconds until then."""
        seconds = max(self._next_pause(key), at_least_seconds)
        self.add_after(key, seconds)
        return seconds

    def hold(self, key: KeyT) -> float:
        """As after a failure, but not before then, whoever asked for it meanwhile or does: until `release`."""
        seconds = self._next_pause(key)
        self._waiting.pop(key, None)
        self._cancel_timer(key)
        self._held.add(key)
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.release, key)
        return seconds

    def release(self, key: KeyT) -> None:
        """A key that is held is due now; nothing happens to another."""
        if key in self._held:
            self._held.discard(key)
            self.add(key)

    def settle(self, key: KeyT) -> None:
        """After a success: the next failure counts as the first."""
        self._failures.pop(key, None)

    def failures(self, key: KeyT) -> int:
        """In a row, up to now."""
        return self._failures.get(key, 0)

    async def take(self) -> KeyT:
        """The key that waits longest of those that do not run; it runs until `done`."""
        while (key := self._next()) is None:
            await self._change()
        del self._waiting[key]
        self._running.add(key)
        return key

    def done(self, key: KeyT) -> None:
        self._running.discard(key)
        self._changed.set()

    async def join(self) -> None:
        """Returns when nothing runs."""
        while self._running:
            await self._change()

    def _next_pause(self, key: KeyT) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        seconds = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures, 30))
        return seconds * (1 + self._chance.uniform(-JITTER, JITTER))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _next(self) -> KeyT | None:
        return next((key for key in self._waiting if key not in self._running), None)

    def _cancel_timer(self, key: KeyT) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
