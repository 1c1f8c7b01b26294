"""The choice of the adapter that leaves memory when another adapter needs a slot. The functions are pure.

An idle adapter leaves first, starting with the least recently used adapter. The milliseconds between two calls of a
training program do not count as idle time. If all adapters have work, each adapter stays for a period that is long
compared with the time of an exchange. The period is shorter if a new model waits, or if the tenant of a waiting model
has fewer slots. An adapter never leaves while an operation of its model is in progress.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ResidencyRules:
    """The times for which adapters stay in memory.

    `idle_seconds` is the time for which an adapter without work stays. `idle_seconds` is extended if an exchange of two
    adapters takes longer. `turn_seconds` is the minimum time for which an adapter with work stays. `turn_seconds` is
    extended if exchanges would take more than 1 / `exchange_share` of the engine's time.
    """

    idle_seconds: float = 0.25
    turn_seconds: float = 2.0
    exchange_share: float = 5.0


@dataclass(frozen=True, slots=True)
class Stay:
    """An adapter in memory, and the times of its use. Times are in seconds of one clock.

    `busy`: the adapter's model has an operation that can run now. `pinned`: the adapter's model has an operation in
    progress. `not_before` is the earliest time of the next attempt to save the adapter, or 0 if no attempt has failed.
    """

    model_id: str
    tenant: str
    since: float
    used_at: float
    busy: bool = False
    pinned: bool = False
    not_before: float = 0.0


@dataclass(frozen=True)
class Residency:
    """The adapters in memory at one moment, the time of an exchange, and the tenant of the model that needs a slot.

    The model that needs a slot may be new.
    """

    stays: Collection[Stay]
    now: float
    exchange_seconds: float
    rules: ResidencyRules
    tenant: str
    is_new: bool = False

    def leaver(self) -> Stay | None:
        """Return the adapter that must leave, or None if no adapter may leave yet."""
        leaving = [stay for stay in self.stays if self._may_leave_at(stay) <= self.now]
        unused = [stay for stay in leaving if self._unused_at(stay) <= self.now]
        if unused:
            return min(unused, key=lambda stay: (stay.used_at, stay.model_id))
        held = self._held + Counter([self.tenant])
        return min(leaving, key=lambda stay: (-held[stay.tenant], stay.since, stay.model_id), default=None)

    def seconds_until_one_leaves(self) -> float:
        """Return the seconds until an adapter may leave.

        The number is infinite if no adapter will leave without another change.
        """
        return max(min(map(self._may_leave_at, self.stays), default=math.inf) - self.now, 0.0)

    def _may_leave_at(self, stay: Stay) -> float:
        if stay.pinned:
            return math.inf
        return max(min(stay.since + self._turn_seconds(stay), self._unused_at(stay)), stay.not_before)

    def _turn_seconds(self, stay: Stay) -> float:
        """Return how long an adapter with work stays.

        During this time each slot has one exchange, and the engine's thread makes all exchanges.
        """
        if self.is_new or self._held[stay.tenant] > self._held[self.tenant] + 1:
            return self.rules.turn_seconds
        exchanges_seconds = len(self.stays) * self.exchange_seconds
        return max(self.rules.turn_seconds, self.rules.exchange_share * exchanges_seconds)

    @cached_property
    def _held(self) -> Counter[str]:
        """Return the number of slots that each tenant uses."""
        return Counter(stay.tenant for stay in self.stays)

    def _unused_at(self, stay: Stay) -> float:
        """Return the time from which on the adapter counts as idle."""
        if stay.busy or stay.pinned:
            return math.inf
        return stay.used_at + max(self.rules.idle_seconds, self.exchange_seconds)
