"""Queries about promoted names. Each change of a name is a row, and the last row is valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.accounting import write_extra_rows
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    count,
    fetch_one,
    insert_unless_there,
    select_records,
    values,
)
from tinsmith_server.store.records import Checkpoint, ExtraRows, PromotedPath, Promotion, PromotionBounds
from tinsmith_server.store.tables import checkpoints, promotions

# This lock has two numbers as its key. It cannot collide with the lock of migrations, whose key is one number.
_ADVISORY_LOCK = 0x70726F6D


class PromotionQueries(Queries):
    """The queries about promoted names."""

    async def add_promotion(
        self,
        promotion: Promotion,
        previous: Promotion | None,
        checkpoint: Checkpoint,
        most: PromotionBounds,
        extra_rows: ExtraRows = (),
    ) -> bool:
        """Add a promotion.

        Returns False and changes nothing if the promotion is outdated, or if a new name exceeds the limit. A promotion
        is outdated if the current promotion is not `previous`, if the checkpoint no longer exists, or if the checkpoint
        has an expiry.
        """
        tenant, name = promotion.tenant, promotion.name
        forget = delete(promotions).where(
            _named(tenant, name), promotions.c.number <= promotion.number - most.kept_per_name
        )

        async def add(connection: AsyncConnection) -> bool:
            await lock_names(connection, tenant)
            if not await count(connection, _lasting(checkpoint)):
                return False
            # The whole promotions are compared. The number alone is not enough, because numbers restart if a removed
            # name is promoted again.
            if await fetch_one(connection, Promotion, _newest(tenant, name)) != previous:
                return False
            if previous is None and await count(connection, _names_of(tenant)) >= most.names:
                return False
            if not await insert_unless_there(connection, promotions, values(promotion)):
                return False
            await connection.execute(forget)
            await write_extra_rows(connection, extra_rows)
            return True

        return await self._database.write(add)

    async def promotion(self, tenant: str, name: str) -> Promotion | None:
        """Return the current promotion of a name."""
        return await self._look_up(Promotion, _newest(tenant, name))

    async def promotions_of(self, tenant: str, name: str) -> Sequence[Promotion]:
        """Return all promotions of a name, newest first."""
        query = select_records(promotions, Promotion).where(_named(tenant, name))
        return await self._read_all(Promotion, query.order_by(promotions.c.number.desc()))

    async def list_promotions(self, tenant: str) -> Sequence[Promotion]:
        """Return the current promotion of each name, sorted by name."""
        query = select_records(promotions, Promotion).where(promotions.c.tenant == tenant, _is_newest())
        return await self._read_all(Promotion, query.order_by(promotions.c.name))

    async def names_promoted_to(self, tenant: str, tinker_path: str) -> Sequence[str]:
        """Return the names that point to the path now."""
        names = _promoted(PromotedPath(tenant, tinker_path)).order_by(promotions.c.name)
        return await self._read_ids(names)

    async def remove_promotions(self, tenant: str, name: str, extra_rows: ExtraRows = ()) -> bool:
        """Remove all promotions of a name. Returns False if the name has no promotions."""

        async def remove(connection: AsyncConnection) -> bool:
            await lock_names(connection, tenant)
            if not await changes_rows(connection, delete(promotions).where(_named(tenant, name))):
                return False
            await write_extra_rows(connection, extra_rows)
            return True

        return await self._database.write(remove)


def _named(tenant: str, name: str) -> ColumnElement[bool]:
    return (promotions.c.tenant == tenant) & (promotions.c.name == name)


def _newest(tenant: str, name: str) -> Select[Any]:
    found = select_records(promotions, Promotion).where(_named(tenant, name))
    return found.order_by(promotions.c.number.desc()).limit(1)


def _names_of(tenant: str) -> Select[Any]:
    return select(func.count(promotions.c.name.distinct())).where(promotions.c.tenant == tenant)


def _lasting(checkpoint: Checkpoint) -> Select[Any]:
    """Return a query that counts 1 if the checkpoint still exists and has no expiry, otherwise 0."""
    named = (checkpoints.c.run_id, checkpoints.c.type, checkpoints.c.name)
    lasts = checkpoints.c.deleted_at.is_(None) & checkpoints.c.expires_at.is_(None)
    this = (checkpoint.run_id, checkpoint.type, checkpoint.name)
    return select(func.count()).where(tuple_(*named) == this, lasts)


def _promoted(path: PromotedPath) -> Select[Any]:
    stands = (promotions.c.tenant == path.tenant) & (promotions.c.tinker_path == path.tinker_path)
    return select(promotions.c.name).where(stands, _is_newest())


async def is_promoted(connection: AsyncConnection, path: PromotedPath) -> bool:
    """Return whether a name points to the path.

    After the answer False, no name can be pointed to the path before this transaction ends.
    """
    await lock_names(connection, path.tenant)
    return (await connection.execute(_promoted(path).limit(1))).one_or_none() is not None


async def lock_names(connection: AsyncConnection, tenant: str) -> None:
    """Lock the tenant's names until this transaction ends.

    Locks of rows are not enough, because missing rows and counts must not change either.

    SQLite allows only one writer at a time anyway.
    """
    if connection.dialect.name == "postgresql":
        await connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK, func.hashtext(tenant))))


def _is_newest() -> ColumnElement[bool]:
    later = promotions.alias()
    newest = select(func.max(later.c.number)).where(
        later.c.tenant == promotions.c.tenant, later.c.name == promotions.c.name
    )
    return promotions.c.number == newest.correlate(promotions).scalar_subquery()
