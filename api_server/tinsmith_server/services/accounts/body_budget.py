"""Memory for request bodies and large results. Each tenant has a limit, and all tenants together have a common limit.

Only received bytes count, so a slow sender holds no memory that other requests could use. A body that does not fit is
not read, and TCP slows its sender down.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tinsmith_server.errors import TooBusy

# The SDK waits 60 s for a submission's answer, and retries for 300 s. So waiting is better than refusing.
WAIT_SECONDS = 20.0

T = TypeVar("T")


@dataclass(slots=True)
class Wait:
    """A request's wait for more bytes."""

    size: int
    over: asyncio.Event = field(default_factory=asyncio.Event)


class BodyBudget:
    """A budget of bytes.

    The request that has been receiving for the longest time always gets room, even beyond its tenant's limit and the
    common limit. Without this rule, bodies that are only partly received could wait for each other without end.
    """

    def __init__(self, bytes_per_tenant: int, bytes_in_all: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self._per_tenant = bytes_per_tenant
        self._in_all = bytes_in_all
        self._wait_seconds = wait_seconds
        self.held_bytes = 0
        self._held: Counter[str] = Counter()
        # The accounts by tenant, in the order of their start.
        self._receiving: defaultdict[str, dict[Account, None]] = defaultdict(dict)
        self._waiting: defaultdict[str, dict[Account, Wait]] = defaultdict(dict)

    @contextmanager
    def account(self, tenant: str) -> Iterator[Account]:
        """Open an account. At the end of the context, the bytes of the account are returned."""
        account = Account(self, tenant)
        self._receiving[tenant][account] = None
        try:
            yield account
        finally:
            self._change(account, -account.held_bytes)
            self.received(account)

    async def take(self, account: Account, size: int) -> None:
        if self.fits(account, size):
            self._change(account, size)
            return
        wait = Wait(size)
        self._waiting[account.tenant][account] = wait
        try:
            async with asyncio.timeout(self._wait_seconds):
                await wait.over.wait()
        except TimeoutError:
            if not wait.over.is_set():
                raise TooBusy(self._why(account.tenant)) from None
        finally:
            _remove(self._waiting, account)

    def overdraw(self, account: Account, size: int) -> None:
        self._change(account, size)

    def give_back(self, account: Account, size: int) -> None:
        self._change(account, -size)
        self._wake_all()

    def received(self, account: Account) -> None:
        """Mark the body as received completely. The oldest request that is still receiving then has priority."""
        _remove(self._receiving, account)
        self._wake_all()

    def _wake_all(self) -> None:
        for tenant in list(self._waiting):
            self._wake(tenant)

    def _wake(self, tenant: str) -> None:
        """Grant bytes to the tenant's waiting requests.

        The oldest request comes first, then other requests while there is room.
        """
        waiting = self._waiting[tenant]
        first = next(iter(self._receiving[tenant]), None)
        if first in waiting:
            self._grant(first, waiting[first])
        for account, wait in waiting.items():
            if not wait.over.is_set() and not self._grant(account, wait):
                return

    def _grant(self, account: Account, wait: Wait) -> bool:
        if wait.over.is_set() or not self.fits(account, wait.size):
            return False
        self._change(account, wait.size)
        wait.over.set()
        return True

    def _change(self, account: Account, size: int) -> None:
        account.held_bytes += size
        self.held_bytes += size
        self._held[account.tenant] += size
        if not self._held[account.tenant]:
            del self._held[account.tenant]

    def fits(self, account: Account, size: int) -> bool:
        within = self._held[account.tenant] + size <= self._per_tenant
        within_all = self.held_bytes + size <= self._in_all
        return (within or account is self._first_of(account.tenant)) and (within_all or account is self._first())

    def _first_of(self, tenant: str) -> Account | None:
        return next(iter(self._receiving.get(tenant, ())), None)

    def _first(self) -> Account | None:
        firsts = [next(iter(accounts)) for accounts in self._receiving.values() if accounts]
        return min(firsts, key=lambda account: account.number, default=None)

    def _why(self, tenant: str) -> str:
        mine = self._held[tenant]
        if mine >= self._per_tenant // 2:
            return (
                f"your requests in flight have {mine} bytes, and the limit is {self._per_tenant} (setting "
                "body_bytes_per_tenant); send fewer large requests at once"
            )
        return (
            f"the requests in flight have reached the server's limit of {self._in_all} bytes (setting "
            "body_bytes_in_all); retry in some seconds"
        )


class Account:
    """The bytes that one request holds."""

    _last = 0

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.held_bytes = 0
        Account._last += 1
        self.number = Account._last

    def has_room(self, size: int) -> bool:
        """Return whether `take` would get the bytes without waiting."""
        return self._budget.fits(self, size)

    async def take(self, size: int) -> None:
        """Take bytes when there is room. Raises TooBusy after a long wait."""
        await self._budget.take(self, size)

    def give_back(self, size: int) -> None:
        self._budget.give_back(self, size)

    @contextmanager
    def overdrawn(self, size: int) -> Iterator[None]:
        """Take bytes without waiting.

        Use this method only for work that runs one at a time, because the memory of such work is limited.
        """
        self._budget.overdraw(self, size)
        try:
            yield
        finally:
            self.give_back(size)

    def received(self) -> None:
        self._budget.received(self)


def _remove(accounts: dict[str, dict[Account, T]], account: Account) -> None:
    mine = accounts.get(account.tenant, {})
    mine.pop(account, None)
    if not mine:
        accounts.pop(account.tenant, None)
