"""A queue of keys that must be reconciled.

Each key is in the queue at most once, and is never reconciled twice at the same time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from enum import IntEnum
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 300.0
# Keys that failed at the same time must not be retried at the same time.
JITTER = 0.25


class Precedence(IntEnum):
    """The order in which waiting keys are reconciled.

    Sessions that have begun come to their end before more begin. The first statuses of others wait meanwhile, because a
    pod takes longer to start than a status takes to write. Those with a ready pod come before those without.
    """

    ORDINARY = 0
    NEW = 1
    FIRST_STATUS = 2
    STARTING = 3


MOST_OVERTAKEN = {Precedence.NEW: 16, Precedence.FIRST_STATUS: 16, Precedence.STARTING: 64}
"""The largest number of other keys that may overtake the oldest key of this precedence."""


class WorkQueue(Generic[KeyT]):
    """A work queue.

    A key is waiting, running, due later, or both waiting and running (after it was added again during its run).

    A held key never runs before its due time. Use a queue from only one event loop, because the queue uses the clock of
    the event loop.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self._waiting: dict[Precedence, dict[KeyT, None]] = {each: {} for each in Precedence}
        self._overtaken = dict.fromkeys(MOST_OVERTAKEN, 0)
        self._running: set[KeyT] = set()
        self._held: set[KeyT] = set()
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        self._failures: dict[KeyT, int] = {}
        self._chance = chance or random.Random()
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """The number of waiting keys."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, key: KeyT, precedence: Precedence = Precedence.ORDINARY) -> None:
        """Add a key that is due now. A key that is running runs once more afterwards.

        A waiting key that is added again keeps its place, unless the new precedence is higher.
        """
        if key in self._held:
            return
        self._cancel_timer(key)
        before = self._precedence_of(key)
        if before is None or precedence < before:
            self._drop(key)
            self._waiting[precedence][key] = None
        self._changed.set()

    def add_after(self, key: KeyT, seconds: float, precedence: Precedence = Precedence.ORDINARY) -> None:
        """Add a key that is due after this number of seconds, unless the key is already due earlier."""
        if key in self._held or self._precedence_of(key) is not None:
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_later(seconds, self.add, key, precedence)

    def retry(self, key: KeyT, at_least_seconds: float = 0.0) -> float:
        """Add a failed key with jitter and with a delay that grows at each failure. Return the delay in seconds."""
        seconds = max(self._next_pause(key), at_least_seconds)
        self.add_after(key, seconds)
        return seconds

    def hold(self, key: KeyT) -> float:
        """Add a key with the delay of a failed key.

        A held key keeps its due time until `release`, even if the key is added again.
        """
        seconds = self._next_pause(key)
        self._drop(key)
        self._cancel_timer(key)
        self._held.add(key)
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.release, key)
        return seconds

    def release(self, key: KeyT) -> None:
        """Make a held key due now."""
        if key in self._held:
            self._held.discard(key)
            self.add(key)

    def settle(self, key: KeyT) -> None:
        """Reset the number of failures of a key after a success."""
        self._failures.pop(key, None)

    def failures(self, key: KeyT) -> int:
        """Return the number of consecutive failures of a key."""
        return self._failures.get(key, 0)

    async def take(self) -> KeyT:
        """Return the key of the highest precedence that is not running and has waited longest.

        A key that was overtaken too often comes first. The returned key counts as running until `done` is called.
        """
        while (key := self._next()) is None:
            await self._change()
        taken = self._precedence_of(key)
        self._drop(key)
        for precedence in self._overtaken:
            if precedence == taken or not self._waiting[precedence]:
                self._overtaken[precedence] = 0
            elif taken is not None and taken < precedence:
                self._overtaken[precedence] += 1
        self._running.add(key)
        return key

    def done(self, key: KeyT) -> None:
        self._running.discard(key)
        self._changed.set()

    async def join(self) -> None:
        """Wait until no key is running."""
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
        order = sorted(Precedence, key=lambda each: (not self._is_due(each), each))
        return next((key for each in order for key in self._waiting[each] if key not in self._running), None)

    def _is_due(self, precedence: Precedence) -> bool:
        return precedence in MOST_OVERTAKEN and self._overtaken[precedence] >= MOST_OVERTAKEN[precedence]

    def _precedence_of(self, key: KeyT) -> Precedence | None:
        return next((precedence for precedence, keys in self._waiting.items() if key in keys), None)

    def _drop(self, key: KeyT) -> None:
        for keys in self._waiting.values():
            keys.pop(key, None)

    def _cancel_timer(self, key: KeyT) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
