"""What each tenant may have of a sampler's limits, so that none is turned away for another's sake. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass


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
