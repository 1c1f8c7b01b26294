"""Turns of training and sampling on one device, in equal shares of time.

An engine and a sampler of one process share the device. Each one holds the device for a turn. A turn of sampling is one
decode step or one block of a prompt. A turn of training is a microbatch, which may take a hundred times as long. So the
engine offers the device between two layers, and a decode step never waits for a whole microbatch.

The two uses alternate by time and not by arrival. Otherwise, a sampler with steps of 25 ms would get one step for each
microbatch of 400 ms.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

CREDIT_SECONDS = 0.05
"""The time by which one use may be ahead of the other use without giving up its turn.

A decode step waits at most for this time and one layer. The time is long enough for two decode steps of an 8B model, so
that short turns do not leave the processor's caches cold each time.
"""


class Use(Enum):
    """A use of the device."""

    TRAINING = "training"
    SAMPLING = "sampling"

    @property
    def other(self) -> Use:
        return Use.SAMPLING if self is Use.TRAINING else Use.TRAINING


@dataclass(slots=True)
class TimeShares:
    """The decision which use has the next turn. The class has no clock and no lock.

    `lead_seconds` is the time by which training is ahead of sampling; a negative time means that sampling is ahead.
    Only time during which the other use was waiting counts. A lead is at most the credit, or one turn if a turn is
    longer. So a use that was absent does not get all missed turns later.
    """

    credit_seconds: float = CREDIT_SECONDS
    lead_seconds: float = 0.0

    def charge(self, use: Use, seconds: float) -> None:
        """Count a turn, or a part of a turn, during which the other use was waiting."""
        most = max(self.credit_seconds, seconds)
        if use is Use.TRAINING:
            self.lead_seconds = min(self.lead_seconds + seconds, most)
        else:
            self.lead_seconds = max(self.lead_seconds - seconds, -most)

    def is_due(self, use: Use) -> bool:
        """Return whether a waiting use has had no more time than the use that holds the device."""
        return self.lead_seconds >= 0 if use is Use.SAMPLING else self.lead_seconds <= 0

    def next_use(self, waiting: Collection[Use], first: Use) -> Use:
        """Return the use that has had less time. `first` is the use that has waited longest; it wins a tie."""
        if len(waiting) == 1:
            return next(iter(waiting))
        return first if self.is_due(first) else first.other


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A thread that waits for a turn."""

    number: int
    since: float
    ready: threading.Event = field(default_factory=threading.Event)


class DeviceTurns:
    """The lock of a device. `with turns.held(Use.SAMPLING): …` waits for a turn.

    Threads with the same use have turns in the order of their requests. `clock` returns seconds. `waited_seconds` is
    the time for which the threads of each use have waited for their turns.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, credit_seconds: float = CREDIT_SECONDS) -> None:
        self._guard = threading.Lock()
        self._clock = clock
        self._shares = TimeShares(credit_seconds)
        self._waiting: dict[Use, deque[_Waiter]] = {use: deque() for use in Use}
        self._numbers = count()
        self.waited_seconds = dict.fromkeys(Use, 0.0)
        self._user: Use | None = None
        self._since = 0.0

    @property
    def user(self) -> Use | None:
        """The use that holds the device."""
        return self._user

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a turn."""
        with self._guard:
            return sum(len(waiters) for waiters in self._waiting.values())

    @contextmanager
    def held(self, use: Use) -> Iterator[None]:
        """Hold the device for one turn."""
        with self._guard:
            waiter = None if self._user is None else self._line_up(use)
            if waiter is None:
                self._begin(use)
        if waiter is not None:
            waiter.ready.wait()
        try:
            yield
        finally:
            with self._guard:
                self._pass_on()

    def offer(self) -> None:
        """Let a waiting sampler have its turns, in the middle of a turn of training. Otherwise this does nothing.

        The engine calls this between two layers, in any of its threads. Layers of a sampler's forward call this too,
        because the model is shared; a turn of sampling is never interrupted.
        """
        with self._guard:
            if self._user is not Use.TRAINING or not self._waiting[Use.SAMPLING]:
                return
            self._charge()
            if not self._shares.is_due(Use.SAMPLING):
                return
            waiter = self._line_up(Use.TRAINING, is_first=True)
            self._start(Use.SAMPLING)
        waiter.ready.wait()

    def _line_up(self, use: Use, *, is_first: bool = False) -> _Waiter:
        waiter = _Waiter(next(self._numbers), self._clock())
        if is_first:
            self._waiting[use].appendleft(waiter)  # before other calls of the engine: it is in the middle of a turn
        else:
            self._waiting[use].append(waiter)
        return waiter

    def _begin(self, use: Use) -> None:
        self._user, self._since = use, self._clock()

    def _start(self, use: Use) -> None:
        """Give the turn to the first waiter of a use."""
        waiter = self._waiting[use].popleft()
        self._begin(use)
        self.waited_seconds[use] += self._since - waiter.since
        waiter.ready.set()

    def _pass_on(self) -> None:
        self._charge()
        first = {waiters[0].number: use for use, waiters in self._waiting.items() if waiters}
        if first:
            self._start(self._shares.next_use(first.values(), first[min(first)]))
        else:
            self._user = None

    def _charge(self) -> None:
        """Charge the holder for the time in which the other use was waiting, since the last charge."""
        assert self._user is not None
        now = self._clock()
        if others := self._waiting[self._user.other]:
            self._shares.charge(self._user, now - max(self._since, others[0].since))
        self._since = now
