"""Limits on the resources that requests use: memory for bodies, the parsing of bodies, the event loop, and rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from tinsmith_server.services.accounts.body_budget import BodyBudget
from tinsmith_server.services.accounts.concurrency import FairLock, RequestSlots
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.services.accounts.limits import Limits
from tinsmith_server.services.accounts.rates import Rates
from tinsmith_server.settings import Settings

T = TypeVar("T")

# Telemetry needs no key, so anyone may send it.
TELEMETRY_BYTES = 16 * 2**20
TELEMETRY_WAIT_SECONDS = 1.0
# A smaller body of any content is read in about a millisecond. A thread would cost another fifth of that.
INLINE_BYTES = 16 * 1024


class Admission:
    """The limits of one server: `bodies` for requests, `results` for large results, and `slots` for the event loop."""

    def __init__(self, settings: Settings, keys: Keys, limits: Limits) -> None:
        self.bodies = BodyBudget(settings.body_bytes_per_tenant, settings.body_bytes_in_all)
        self.results = BodyBudget(settings.body_bytes_per_tenant, settings.body_bytes_in_all)
        self.telemetry = BodyBudget(TELEMETRY_BYTES, TELEMETRY_BYTES, TELEMETRY_WAIT_SECONDS)
        self.slots = RequestSlots()
        self.rates = Rates(
            settings.requests_per_minute or None,
            settings.trained_tokens_per_minute or None,
            settings.sampled_tokens_per_minute or None,
        )
        self._body_lock = FairLock()
        self._keys = keys
        self._limits = limits

    async def admit_request(self, key: str | None, tenant: str) -> None:
        """Charge one request to the key, or to the tenant if it has a limit of its own. Raises TooBusy."""
        per_second = (await self._limits.of(tenant)).requests_per_second
        if per_second is None:
            self.rates.admit_request(self._keys.counted_as(key))
        else:
            self.rates.admit_request_of_tenant(tenant, per_second)

    def admit_sample(self, key: str | None) -> None:
        """Raise TooBusy if the key has used up its rate of sampled tokens."""
        self.rates.sampled.admit(self._keys.counted_as(key))

    def charge_sampled(self, key: str | None, tokens: int) -> None:
        self.rates.sampled.charge(self._keys.counted_as(key), tokens)

    def charge_result(self, key: str | None, request_id: str, count_tokens: Callable[[], int]) -> None:
        """Charge a sample's result once, even if it is fetched several times."""
        if self.rates.sampled.limits:
            self.rates.note_sampled(self._keys.counted_as(key), request_id, count_tokens())

    async def wait_to_train(self, key: str | None) -> None:
        """Wait until the key is below its rate of training tokens. Raises TooBusy."""
        await self.rates.trained.admit_late(self._keys.counted_as(key))

    def charge_trained(self, key: str | None, tokens: int) -> None:
        self.rates.trained.charge(self._keys.counted_as(key), tokens)

    async def off_the_loop(
        self, tenant: str, size: int, work: Callable[[], T], during: AbstractContextManager[None] | None = None
    ) -> T:
        """Run `work` in a thread on a body of `size` bytes. Only the sender of the body waits for the thread.

        The context `during` is open while `work` runs. Only one body is read at a time, because Python runs one thread
        at a time. Tenants take turns.
        """
        if size <= INLINE_BYTES:
            return work()
        async with self._body_lock.held(tenant):
            with during or nullcontext():
                return await asyncio.to_thread(work)
