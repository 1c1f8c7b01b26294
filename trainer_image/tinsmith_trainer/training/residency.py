"""Which adapter leaves memory when another one wants its slot, decided purely.

Whoever has nothing to do leaves first, and of those the one that was used least recently: not between two calls of a
program that trains, which takes some milliseconds. Where all have work they take turns in memory, which are long beside
what the exchanges cost. One of them leaves earlier for a model that is being made, and for one of a tenant that has
fewer slots than the leaver's. An adapter that is at work just now never leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ResidencyRules:
    """idle_seconds: how long one without work is waited for; longer where an exchange of two adapters takes longer.

    turn_seconds: how long one with work stays at least; longer where exchanges would take more than their share of the
    engine's time, which is one part of this many.
    """

    idle_seconds: float = 0.25
    turn_seconds: float = 2.0
    exchange_share: float = 5.0


@dataclass(frozen=True, slots=True)
class Stay:
    """An adapter in memory; moments are seconds of one clock.

    busy: an operation of its model could run now. pinned: one of them has begun.
    not_before: when it may be tried again to save it; 0 unless that has failed.
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
    """Who is in memory, at a moment, what an exchange costs, and for whom: a tenant's model, which may be new."""

    stays: Collection[Stay]
    now: float
    exchange_seconds: float
    rules: ResidencyRules
    tenant: str
    is_new: bool = False

    def who_leaves(self) -> Stay | None:
        """None: nobody yet."""
        leaving = [stay for stay in self.stays if self._may_leave_at(stay) <= self.now]
        unused = [stay for stay in leaving if self._unused_at(stay) <= self.now]
        if unused:
            return min(unused, key=lambda stay: (stay.used_at, stay.model_id))
        held = self._held + Counter([self.tenant])
        return min(leaving, key=lambda stay: (-held[stay.tenant], stay.since, stay.model_id), default=None)

    def seconds_until_one_leaves(self) -> float:
        """Infinite where only a change can help."""
        return max(min(map(self._may_leave_at, self.stays), default=math.inf) - self.now, 0.0)

    def _may_leave_at(self, stay: Stay) -> float:
        if stay.pinned:
            return math.inf
        return max(min(stay.since + self._turn_seconds(stay), self._unused_at(stay)), stay.not_before)

    def _turn_seconds(self, stay: Stay) -> float:
        """Each slot has an exchange in a turn, and the engine makes all of them."""
        if self.is_new or self._held[stay.tenant] > self._held[self.tenant] + 1:
            return self.rules.turn_seconds
        exchanges_seconds = len(self.stays) * self.exchange_seconds
        return max(self.rules.turn_seconds, self.rules.exchange_share * exchanges_seconds)

    @cached_property
    def _held(self) -> Counter[str]:
        """Slots, by tenant."""
        return Counter(stay.tenant for stay in self.stays)

    def _unused_at(self, stay: Stay) -> float:
        """When nobody is expected to come back to it at once."""
        if stay.busy or stay.pinned:
            return math.inf
        return stay.used_at + max(self.rules.idle_seconds, self.exchange_seconds)
