"""The choice of the adapter that leaves memory when another adapter needs its slot. Pure.

An idle adapter leaves first, the least recently used one before the others. The milliseconds between two calls of a
training program do not count as idle. If all adapters have work, each stays for a long period compared with the time of
an exchange. The period is shorter if a new model waits, or a model of a tenant with fewer slots. An adapter whose
operation has begun never leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ResidencyRules:
    """The periods for which adapters stay in memory.

    `idle_seconds` is the time for which an adapter without work stays. It is extended if an exchange of two adapters
    takes longer. `turn_seconds` is the minimum time for which an adapter with work stays. It is extended if exchanges
    would take more than their share of the engine's time, which is one part of `exchange_share`.
    """

    idle_seconds: float = 0.25
    turn_seconds: float = 2.0
    exchange_share: float = 5.0


@dataclass(frozen=True, slots=True)
class Stay:
    """An adapter in memory. Times are seconds of one clock.

    `busy`: an operation of its model can run now. `pinned`: an operation of its model has begun. `not_before` is the
    earliest time of the next attempt to save the adapter; 0 unless an attempt has failed.
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
    """The adapters in memory at a moment, the time of an exchange, and the tenant whose model needs a slot.

    The model may be new.
    """

    stays: Collection[Stay]
    now: float
    exchange_seconds: float
    rules: ResidencyRules
    tenant: str
    is_new: bool = False

    def leaver(self) -> Stay | None:
        """Return the adapter that leaves, or None if none may leave yet."""
        leaving = [stay for stay in self.stays if self._may_leave_at(stay) <= self.now]
        unused = [stay for stay in leaving if self._unused_at(stay) <= self.now]
        if unused:
            return min(unused, key=lambda stay: (stay.used_at, stay.model_id))
        held = self._held + Counter([self.tenant])
        return min(leaving, key=lambda stay: (-held[stay.tenant], stay.since, stay.model_id), default=None)

    def seconds_until_one_leaves(self) -> float:
        """Return the time until an adapter may leave; infinite if an adapter can leave only after another change."""
        return max(min(map(self._may_leave_at, self.stays), default=math.inf) - self.now, 0.0)

    def _may_leave_at(self, stay: Stay) -> float:
        if stay.pinned:
            return math.inf
        return max(min(stay.since + self._turn_seconds(stay), self._unused_at(stay)), stay.not_before)

    def _turn_seconds(self, stay: Stay) -> float:
        """Return how long an adapter with work stays.

        In this time each slot has one exchange, and the engine makes all of them.
        """
        if self.is_new or self._held[stay.tenant] > self._held[self.tenant] + 1:
            return self.rules.turn_seconds
        exchanges_seconds = len(self.stays) * self.exchange_seconds
        return max(self.rules.turn_seconds, self.rules.exchange_share * exchanges_seconds)

    @cached_property
    def _held(self) -> Counter[str]:
        """Return the number of slots of each tenant."""
        return Counter(stay.tenant for stay in self.stays)

    def _unused_at(self, stay: Stay) -> float:
        """Return the time from which the adapter counts as idle."""
        if stay.busy or stay.pinned:
            return math.inf
        return stay.used_at + max(self.rules.idle_seconds, self.exchange_seconds)
