"""Limits of single tenants. A limit that is set for a tenant replaces the setting of the server for this tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tinsmith_server.services.accounts.callers import DEFAULT_TENANT, account_entry
from tinsmith_server.services.accounts.keys import check_tenant_name
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Clock, TenantLimits, TenantTotals, utc_now
from tinsmith_server.store.store import Store

# Another replica applies a change within this time.
CACHE_SECONDS = 5.0

LIMITS = tuple(field.name for field in fields(TenantLimits) if field.name != "tenant")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with its limits, and what it uses of them."""

    limits: TenantLimits
    totals: TenantTotals


def as_dict(limits: TenantLimits) -> dict[str, Any]:
    """Return the limits that are set, by name."""
    return {name: value for name in LIMITS if (value := getattr(limits, name)) is not None}


class Limits:
    """The limits of all tenants. They are few, so they are read together."""

    def __init__(
        self, store: Store, settings: Settings, clock: Clock = utc_now, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._timer = timer
        self._read: Mapping[str, TenantLimits] = {}
        self._read_until = float("-inf")

    async def of(self, tenant: str) -> TenantLimits:
        """Return the tenant's own limits. A limit that is not set is None."""
        return (await self._all()).get(tenant) or TenantLimits(tenant)

    async def adapters(self, tenant: str) -> int:
        return _first((await self.of(tenant)).adapters, self._settings.adapters_per_tenant)

    async def queued_operations(self, tenant: str) -> int:
        return _first((await self.of(tenant)).queued_operations, self._settings.queued_operations_per_tenant)

    async def checkpoint_bytes(self, tenant: str) -> int:
        return _first((await self.of(tenant)).checkpoint_bytes, self._settings.checkpoint_bytes_per_tenant)

    async def share_weight(self, tenant: str) -> float | None:
        return (await self.of(tenant)).share_weight

    async def with_checkpoints_kept(self) -> Sequence[TenantLimits]:
        """Return the limits of the tenants that keep only some checkpoints of each run."""
        return [one for one in (await self._all()).values() if one.checkpoints_kept is not None]

    async def set(self, limits: TenantLimits) -> None:
        """Replace all limits of a tenant, which need not have a key yet. Raises Unprocessable for an invalid name."""
        check_tenant_name(limits.tenant)
        entry = account_entry(limits.tenant, self._clock(), "limits_set", limits=as_dict(limits))
        await self._store.put_tenant_limits(limits, (entry,))
        self._read_until = float("-inf")

    async def tenants(self) -> Sequence[Tenant]:
        """Return all tenants that have a key or limits, and the default tenant."""
        totals = {one.tenant: one for one in await self._store.tenant_totals()}
        limits = {one.tenant: one for one in await self._store.list_tenant_limits()}
        names = sorted({*totals, *limits, DEFAULT_TENANT})
        return [
            Tenant(limits.get(name) or TenantLimits(name), totals.get(name) or TenantTotals(name)) for name in names
        ]

    async def _all(self) -> Mapping[str, TenantLimits]:
        if self._timer() >= self._read_until:
            read = await self._store.list_tenant_limits()
            self._read = {one.tenant: one for one in read}
            self._read_until = self._timer() + CACHE_SECONDS
        return self._read


def _first(limit: int | None, setting: int) -> int:
    return setting if limit is None else limit
