"""How long something has been missing without a break, for those who must not take a moment for the end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import datetime, timedelta
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Grace(Generic[K]):
    """A thing is missing since it was first missed, until it is there; what nobody missed for as long begins anew."""

    def __init__(self, length: timedelta, clock: Callable[[], datetime]) -> None:
        self._length = length
        self._clock = clock
        # Since when, and when last.
        self._missed: dict[K, tuple[datetime, datetime]] = {}

    def is_over(self, thing: K) -> bool:
        """It is missed now; True when it has been for longer than the grace."""
        now = self._clock()
        since, last = self._missed.get(thing, (now, now))
        if now - last > self._length:
            since = now
        self._missed[thing] = (since, now)
        return now - since > self._length

    def note_there(self, thing: K) -> None:
        self._missed.pop(thing, None)
