"""Whose turn it is among tenants: the one that has had least of what they share. Pure.

Fair queueing by deficit. Each tenant's use is counted in costs that the caller names, and the one whose count is
lowest goes next. Who has been away saves no credit, but a little: enough that a small request is done at once, and
too little to keep anybody waiting for it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass


class FairQueue:
    """`credit` is by how much a tenant that comes back may be behind those that stayed.

    Nobody falls behind by more than twice that: who could not use a turn must not have all of them later.
    """

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self._used: dict[str, float] = {}
        self._present: dict[str, None] = {}  # in the order in which they came
        self._level = 0.0

    def enter(self, tenant: str) -> None:
        """It has work from now on. Again is no difference."""
        if tenant in self._present:
            return
        self._raise_level()
        self._forget_absent()
        self._used[tenant] = max(self._used.get(tenant, -math.inf), self._level - self.credit)
        self._present[tenant] = None

    def leave(self, tenant: str) -> None:
        """It has no more work."""
        if tenant in self._present:
            self._raise_level()
            del self._present[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """To one that is present."""
        self._used[tenant] += cost
        behind = self._used[tenant] - max(2 * self.credit, cost)
        for other in self._present:
            self._used[other] = max(self._used[other], behind)

    def order(self) -> list[str]:
        """All that are present, the one whose turn it is first; of equals, who came first."""
        return sorted(self._present, key=self._used.__getitem__)

    def lead(self, ahead: str, behind: str) -> float:
        """By how much one that is present has had more than another."""
        return self._used[ahead] - self._used[behind]

    def _raise_level(self) -> None:
        """It never falls: else each of those that come together would be given a credit more than the one before."""
        lowest = min((self._used[tenant] for tenant in self._present), default=self._level)
        self._level = max(self._level, lowest)

    def _forget_absent(self) -> None:
        """Those that would begin where somebody new does."""
        horizon = self._level - self.credit
        self._used = {name: used for name, used in self._used.items() if name in self._present or used > horizon}


class SharedQuota:
    """A tenant may hold as much as is free.

    So one alone holds half, and there is always room for one more: of n that hold as much as they may each has a part
    of n + 1, and the last part is free.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()
        self._total = 0

    @property
    def tenants(self) -> int:
        return len(self._held)

    def fits(self, tenant: str, amount: int) -> bool:
        """Also what is larger than all there is, alone."""
        return not self._total or self._held[tenant] + amount <= self._size - self._total

    def take(self, tenant: str, amount: int) -> None:
        self._held[tenant] += amount
        self._total += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self._total -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    nbytes: int
    since: float


class KeptResults:
    """What is kept for whoever may still fetch it. Where it is too much, the tenant that has most loses its oldest."""

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # oldest first
        self._of_tenant: dict[str, OrderedDict[str, int]] = {}
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, tenant: str, nbytes: int, now: float) -> None:
        self._kept[request_id] = _Kept(tenant, nbytes, now)
        self._of_tenant.setdefault(tenant, OrderedDict())[request_id] = nbytes
        self._bytes[tenant] += nbytes

    def forget(self, now: float) -> list[str]:
        """Those that are past their time, or too much."""
        gone = []
        while self._kept and next(iter(self._kept.values())).since < now - self._seconds:
            gone.append(self._remove(next(iter(self._kept))))
        while self._kept and sum(self._bytes.values()) > self._most_bytes:
            most = max(self._of_tenant, key=lambda tenant: self._bytes[tenant])
            gone.append(self._remove(next(iter(self._of_tenant[most]))))
        return gone

    def _remove(self, request_id: str) -> str:
        kept = self._kept.pop(request_id)
        del self._of_tenant[kept.tenant][request_id]
        self._bytes[kept.tenant] -= kept.nbytes
        if not self._of_tenant[kept.tenant]:
            del self._of_tenant[kept.tenant], self._bytes[kept.tenant]
        return request_id
