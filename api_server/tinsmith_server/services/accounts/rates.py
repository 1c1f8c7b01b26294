"""Rates per minute for each key, or for each tenant. Each API server counts only its own requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tinsmith_server.errors import TooBusy

MINUTE_SECONDS = 60.0
# The SDK retries a training call for 300 s. Of a large call's debt, the part beyond this time is dropped.
LONGEST_DEBT_SECONDS = 240.0
# A training call waits before it is refused, because the SDK counts the refusals of a call.
PATIENCE_SECONDS = 20.0
REMEMBERED = 4096


@dataclass(slots=True)
class _Account:
    left: float
    at: float


class Rate:
    """A token bucket for each key, which is refilled evenly.

    A call may use more tokens than the bucket has, because the size of a call is known only afterwards. Later calls
    then wait until the debt is paid.
    """

    def __init__(
        self, what: str, setting: str, per_minute: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with full buckets.

        If `per_minute` is None, there is no limit.
        """
        self._what = what
        self._setting = setting
        self._per_minute = per_minute
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    @property
    def limits(self) -> bool:
        return self._per_minute is not None

    def admit(self, key: str, per_minute: float | None = None) -> None:
        """Raise TooBusy with the time of the next attempt if the bucket is empty.

        `per_minute` is the limit of this key, if it has its own.
        """
        per_minute = per_minute or self._per_minute
        if (seconds := self._owed_seconds(key, per_minute)) > 0:
            error = TooBusy(
                f"this key has used up its {per_minute:g} {self._what} a minute ({self._setting}); retry in "
                f"{seconds:.0f} s"
            )
            error.retry_after_seconds = min(seconds, MINUTE_SECONDS)
            raise error

    async def admit_late(self, key: str) -> None:
        """Wait until the bucket is refilled, but not for long. Raises TooBusy."""
        if 0 < (seconds := self._owed_seconds(key, self._per_minute)) <= PATIENCE_SECONDS:
            await asyncio.sleep(seconds)
        self.admit(key)

    def charge(self, key: str, amount: float, per_minute: float | None = None) -> None:
        per_minute = per_minute or self._per_minute
        if per_minute is None:
            return
        account = self._account(key, per_minute)
        owed_most = -per_minute * LONGEST_DEBT_SECONDS / MINUTE_SECONDS
        account.left = max(account.left - amount, owed_most)

    def _owed_seconds(self, key: str, per_minute: float | None) -> float:
        """Return the seconds until the bucket is not empty."""
        if per_minute is None:
            return 0.0
        left = self._account(key, per_minute).left
        return max(0.0, (1.0 - left) * MINUTE_SECONDS / per_minute)

    def _account(self, key: str, per_minute: float) -> _Account:
        now = self._clock()
        account = self._accounts.setdefault(key, _Account(per_minute, now))
        earned = (now - account.at) * per_minute / MINUTE_SECONDS
        account.left, account.at = min(per_minute, account.left + earned), now
        self._accounts.move_to_end(key)
        if len(self._accounts) > REMEMBERED:
            self._accounts.popitem(last=False)
        return account


class Rates:
    """The rates of requests, trained tokens and sampled tokens."""

    def __init__(self, requests: int | None, trained_tokens: int | None, sampled_tokens: int | None) -> None:
        self.requests = Rate("requests", "setting requests_per_minute", requests)
        self.trained = Rate("trained tokens", "setting trained_tokens_per_minute", trained_tokens)
        self.sampled = Rate("sampled tokens", "setting sampled_tokens_per_minute", sampled_tokens)
        self._of_tenants = Rate("requests", "limit requests_per_second of its tenant, for all keys together", None)
        # The samples that were charged already, because a result can be fetched several times.
        self._counted: OrderedDict[str, None] = OrderedDict()

    def admit_request(self, key: str) -> None:
        """Charge one request. Raises TooBusy."""
        self.requests.admit(key)
        self.requests.charge(key, 1)

    def admit_request_of_tenant(self, tenant: str, per_second: float) -> None:
        """Charge one request to a tenant with a limit of its own. Raises TooBusy."""
        per_minute = max(1.0, per_second * MINUTE_SECONDS)
        self._of_tenants.admit(tenant, per_minute)
        self._of_tenants.charge(tenant, 1, per_minute)

    def note_sampled(self, key: str, request_id: str, tokens: int) -> None:
        if request_id in self._counted:
            return
        self._counted[request_id] = None
        if len(self._counted) > REMEMBERED:
            self._counted.popitem(last=False)
        self.sampled.charge(key, tokens)
