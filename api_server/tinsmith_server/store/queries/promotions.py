"""Names that stand for saved samplers: each change is a row of its own, and the last one counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.accounting import write_along
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    count,
    fetch_one,
    insert_unless_there,
    select_records,
    values,
)
from tinsmith_server.store.records import Along, Promotion, PromotionBounds
from tinsmith_server.store.tables import promotions

# Beside the one of migrations, which is of one number.
_ADVISORY_LOCK = 0x70726F6D


class PromotionQueries(Queries):
    """The part of `Store` about promoted names."""

    async def add_promotion(
        self, promotion: Promotion, previous: Promotion | None, most: PromotionBounds, along: Along = ()
    ) -> bool:
        tenant, name = promotion.tenant, promotion.name
        forget = delete(promotions).where(
            _named(tenant, name), promotions.c.number <= promotion.number - most.kept_per_name
        )

        async def add(connection: AsyncConnection) -> bool:
            await _one_after_the_other(connection, tenant)
            # Not by its number: that of a name that was removed, and promoted anew, begins again.
            if await fetch_one(connection, Promotion, _newest(tenant, name)) != previous:
                return False
            if previous is None and await count(connection, _names_of(tenant)) >= most.names:
                return False
            if not await insert_unless_there(connection, promotions, values(promotion)):
                return False
            await connection.execute(forget)
            await write_along(connection, along)
            return True

        return await self._database.write(add)

    async def promotion(self, tenant: str, name: str) -> Promotion | None:
        return await self._look_up(Promotion, _newest(tenant, name))

    async def promotions_of(self, tenant: str, name: str) -> Sequence[Promotion]:
        query = select_records(promotions, Promotion).where(_named(tenant, name))
        return await self._read_all(Promotion, query.order_by(promotions.c.number.desc()))

    async def list_promotions(self, tenant: str) -> Sequence[Promotion]:
        query = select_records(promotions, Promotion).where(promotions.c.tenant == tenant, _is_newest())
        return await self._read_all(Promotion, query.order_by(promotions.c.name))

    async def names_promoted_to(self, tenant: str, tinker_path: str) -> Sequence[str]:
        stands = (promotions.c.tenant == tenant) & (promotions.c.tinker_path == tinker_path)
        return await self._read_ids(select(promotions.c.name).where(stands, _is_newest()).order_by(promotions.c.name))

    async def remove_promotions(self, tenant: str, name: str, along: Along = ()) -> bool:
        async def remove(connection: AsyncConnection) -> bool:
            await _one_after_the_other(connection, tenant)
            if not await changes_rows(connection, delete(promotions).where(_named(tenant, name))):
                return False
            await write_along(connection, along)
            return True

        return await self._database.write(remove)


def _named(tenant: str, name: str) -> ColumnElement[bool]:
    return (promotions.c.tenant == tenant) & (promotions.c.name == name)


def _newest(tenant: str, name: str) -> Select[Any]:
    found = select_records(promotions, Promotion).where(_named(tenant, name))
    return found.order_by(promotions.c.number.desc()).limit(1)


def _names_of(tenant: str) -> Select[Any]:
    return select(func.count(promotions.c.name.distinct())).where(promotions.c.tenant == tenant)


async def _one_after_the_other(connection: AsyncConnection, tenant: str) -> None:
    """Until this transaction ends no other one changes the tenant's names: rows that are not there yet cannot be
    locked, and neither can what is counted. On SQLite one writes at a time anyhow."""
    if connection.dialect.name == "postgresql":
        await connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK, func.hashtext(tenant))))


def _is_newest() -> ColumnElement[bool]:
    later = promotions.alias()
    newest = select(func.max(later.c.number)).where(
        later.c.tenant == promotions.c.tenant, later.c.name == promotions.c.name
    )
    return promotions.c.number == newest.correlate(promotions).scalar_subquery()
