"""Queries about the limits of tenants, and about what tenants use of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.accounting import write_extra_rows
from tinsmith_server.store.queries.base import Queries, insert_into, select_records, values
from tinsmith_server.store.records import LIVE, ExtraRows, TenantLimits, TenantTotals
from tinsmith_server.store.tables import api_keys, checkpoints, models, tenant_limits


class TenantLimitQueries(Queries):
    """The queries about the limits of tenants."""

    async def list_tenant_limits(self) -> Sequence[TenantLimits]:
        """Return the limits of all tenants that have any."""
        query = select_records(tenant_limits, TenantLimits).order_by(tenant_limits.c.tenant)
        return await self._read_all(TenantLimits, query)

    async def put_tenant_limits(self, limits: TenantLimits, extra_rows: ExtraRows = ()) -> None:
        """Replace all limits of the tenant, and write the rows."""
        row = values(limits)

        async def put(connection: AsyncConnection) -> None:
            insert = insert_into(connection, tenant_limits, row)
            await connection.execute(insert.on_conflict_do_update(index_elements=["tenant"], set_=row))
            await write_extra_rows(connection, extra_rows)

        await self._database.write(put)

    async def tenant_totals(self) -> Sequence[TenantTotals]:
        """Return the valid keys, live models and bytes of named checkpoints of each tenant that has a key."""

        async def read(connection: AsyncConnection) -> Sequence[TenantTotals]:
            keys = await _by_tenant(connection, _KEYS)
            live = await _by_tenant(connection, _LIVE_MODELS)
            held = await _by_tenant(connection, _CHECKPOINT_BYTES)
            known = await _by_tenant(connection, _ALL_KEYS)
            names = sorted({*known, *live, *held})
            return [TenantTotals(one, keys.get(one, 0), live.get(one, 0), held.get(one, 0)) for one in names]

        return await self._database.read(read)


_ALL_KEYS = select(api_keys.c.tenant, func.count()).group_by(api_keys.c.tenant)
_KEYS = _ALL_KEYS.where(api_keys.c.revoked_at.is_(None))
_LIVE_MODELS = select(models.c.tenant, func.count()).where(models.c.state.in_(LIVE)).group_by(models.c.tenant)
_CHECKPOINT_BYTES = (
    select(checkpoints.c.tenant, func.sum(checkpoints.c.size_bytes))
    .where(checkpoints.c.deleted_at.is_(None), checkpoints.c.type != "ephemeral")
    .group_by(checkpoints.c.tenant)
)


async def _by_tenant(connection: AsyncConnection, query: Select[Any]) -> Mapping[str, int]:
    return {tenant: int(amount) for tenant, amount in await connection.execute(query)}
