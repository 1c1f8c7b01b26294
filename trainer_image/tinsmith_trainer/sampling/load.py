"""The load of a sampler, for autoscalers: the age of its oldest unfinished sample, and the speed of its draws."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30.0
"""The time over which the speed is averaged. An autoscaler that asks every 15 s sees a change within two questions."""


class SamplerLoad:
    """The unfinished samples and the drawn tokens of one sampler. Used on one event loop.

    The sampler computes the speed itself, so that every API server reads the same value.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # In the order of their arrival.
        self._unfinished: dict[str, float] = {}
        self._totals = deque([(clock(), 0)])

    def took(self, request_id: str) -> None:
        self._unfinished[request_id] = self._clock()

    def ended(self, request_id: str) -> None:
        del self._unfinished[request_id]

    def oldest_seconds(self) -> float:
        """Return the age of the oldest sample that waits or runs, or 0.

        Running samples count, because a token server does not say which of its samples wait.
        """
        oldest = next(iter(self._unfinished.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest

    def tokens_per_second(self, total: int) -> float:
        """Return the mean speed over the window. `total` counts all tokens so far.

        If the method is called more rarely, the mean is over the time since the last call, and at first since the
        start.
        """
        now = self._clock()
        while len(self._totals) > 1 and self._totals[1][0] <= now - WINDOW_SECONDS:
            self._totals.popleft()
        at, before = self._totals[0]
        self._totals.append((now, total))
        return (total - before) / (now - at) if now > at else 0.0
