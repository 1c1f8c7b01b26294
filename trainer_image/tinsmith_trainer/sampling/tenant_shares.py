"""Fair shares of tenants in a sampler: the order of turns, and the quota of each tenant. The functions are pure.

The use of each tenant is counted as costs, and the tenant with the lowest count is next. The caller chooses the unit of
the costs. A tenant that returns has a small credit, so that a small request can run at once without a noticeable delay
for other tenants.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass


class FairQueue:
    """The tenants in the order of turns.

    `credit` is the largest amount by which a returning tenant's count may be below the counts of other tenants. The
    counts of two tenants never differ by more than twice the credit. A tenant that misses turns does not get all missed
    turns later.
    """

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self._used: dict[str, float] = {}
        self._present: dict[str, None] = {}  # in the order of arrival
        self._level = 0.0

    def enter(self, tenant: str) -> None:
        """Note that the tenant has work. Repeated calls have no effect."""
        if tenant in self._present:
            return
        self._raise_level()
        self._forget_absent()
        self._used[tenant] = max(self._used.get(tenant, -math.inf), self._level - self.credit)
        self._present[tenant] = None

    def leave(self, tenant: str) -> None:
        """Note that the tenant has no more work."""
        if tenant in self._present:
            self._raise_level()
            del self._present[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """Add a cost to the count of a present tenant."""
        self._used[tenant] += cost
        behind = self._used[tenant] - max(2 * self.credit, cost)
        for other in self._present:
            self._used[other] = max(self._used[other], behind)

    def order(self) -> list[str]:
        """Return all present tenants in the order of turns.

        If counts are equal, the tenant that came first is first.
        """
        return sorted(self._present, key=self._used.__getitem__)

    def lead(self, ahead: str, behind: str) -> float:
        """Return how much more one present tenant has used than another tenant."""
        return self._used[ahead] - self._used[behind]

    def _raise_level(self) -> None:
        """Raise the level at which the counts of returning tenants begin.

        The level never falls. If the level could fall, each of several new tenants would get more credit than the
        previous tenant.
        """
        lowest = min((self._used[tenant] for tenant in self._present), default=self._level)
        self._level = max(self._level, lowest)

    def _forget_absent(self) -> None:
        """Forget absent tenants that have the same count as a new tenant."""
        horizon = self._level - self.credit
        self._used = {name: used for name, used in self._used.items() if name in self._present or used > horizon}


class SharedQuota:
    """A quota in which each tenant may hold as much as is free.

    So a single tenant may hold at most half, and another tenant always finds room. If n tenants hold the maximum, the
    quota has n + 1 equal parts: one for each tenant, and a free part.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()
        self._total = 0

    @property
    def tenants(self) -> int:
        return len(self._held)

    def fits(self, tenant: str, amount: int) -> bool:
        """Return whether the tenant may hold this amount in addition.

        An amount above the whole quota fits if no tenant holds anything.
        """
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
    """Results that clients may still fetch.

    If the results are too large, the oldest result of the tenant with the most bytes is dropped.
    """

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the oldest result is first
        self._of_tenant: dict[str, OrderedDict[str, int]] = {}
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, tenant: str, nbytes: int, now: float) -> None:
        self._kept[request_id] = _Kept(tenant, nbytes, now)
        self._of_tenant.setdefault(tenant, OrderedDict())[request_id] = nbytes
        self._bytes[tenant] += nbytes

    def forget(self, now: float) -> list[str]:
        """Return the results that are now too old or too large."""
        request_ids = []
        while self._kept and next(iter(self._kept.values())).since < now - self._seconds:
            request_ids.append(self._remove(next(iter(self._kept))))
        while self._kept and sum(self._bytes.values()) > self._most_bytes:
            most = max(self._of_tenant, key=lambda tenant: self._bytes[tenant])
            request_ids.append(self._remove(next(iter(self._of_tenant[most]))))
        return request_ids

    def _remove(self, request_id: str) -> str:
        kept = self._kept.pop(request_id)
        del self._of_tenant[kept.tenant][request_id]
        self._bytes[kept.tenant] -= kept.nbytes
        if not self._of_tenant[kept.tenant]:
            del self._of_tenant[kept.tenant], self._bytes[kept.tenant]
        return request_id
