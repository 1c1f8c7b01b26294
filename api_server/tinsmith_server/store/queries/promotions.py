"""Names that stand for saved samplers: each change is a row of its own, and the last one counts."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.accounting import write_along
from tinsmith_server.store.queries.base import Queries, changes_rows, insert_unless_there, select_records, values
from tinsmith_server.store.records import Along, Promotion
from tinsmith_server.store.tables import promotions


class PromotionQueries(Queries):
    """The part of `Store` about promoted names."""

    async def add_promotion(self, promotion: Promotion, most_kept: int, along: Along = ()) -> bool:
        too_old = promotions.c.number <= promotion.number - most_kept
        forget = delete(promotions).where(_named(promotion.tenant, promotion.name), too_old)

        previous = select(promotions.c.number).where(
            _named(promotion.tenant, promotion.name), promotions.c.number == promotion.number - 1
        )

        async def add(connection: AsyncConnection) -> bool:
            if promotion.number > 1 and await connection.scalar(previous) is None:
                return False
            if not await insert_unless_there(connection, promotions, values(promotion)):
                return False
            await connection.execute(forget)
            await write_along(connection, along)
            return True

        return await self._database.write(add)

    async def promotion(self, tenant: str, name: str) -> Promotion | None:
        newest = select_records(promotions, Promotion).where(_named(tenant, name))
        return await self._look_up(Promotion, newest.order_by(promotions.c.number.desc()).limit(1))

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
            if not await changes_rows(connection, delete(promotions).where(_named(tenant, name))):
                return False
            await write_along(connection, along)
            return True

        return await self._database.write(remove)


def _named(tenant: str, name: str) -> ColumnElement[bool]:
    return (promotions.c.tenant == tenant) & (promotions.c.name == name)


def _is_newest() -> ColumnElement[bool]:
    later = promotions.alias()
    newest = select(func.max(later.c.number)).where(
        later.c.tenant == promotions.c.tenant, later.c.name == promotions.c.name
    )
    return promotions.c.number == newest.correlate(promotions).scalar_subquery()
