"""Whose turn it is among tenants: the one that has had least of what they share. Pure.

Fair queueing by deficit. Each tenant's use is counted in costs that the caller names, and the one whose count is
lowest goes next. Who has been away saves no credit, but a little: enough that a small request is done at once, and
too little to keep anybody waiting for it.
"""

from __future__ import annotations

import math


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
