"""Queries about API keys, and about ended logins with a key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.accounting import write_extra_rows
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    fetch_made,
    insert_unless_there,
    select_records,
)
from tinsmith_server.store.records import ApiKey, ExtraRows, Role
from tinsmith_server.store.tables import api_keys, ended_logins, secrets

_FIRST_KEY = "first key"


class KeyQueries(Queries):
    """The queries about keys."""

    async def add_key(
        self,
        tenant: str,
        name: str,
        prefix: str,
        key_hash: str,
        now: datetime,
        role: Role = "member",
        extra_rows: ExtraRows = (),
    ) -> ApiKey:
        """Insert a key. If a key with this hash exists, return the existing key, even if it is revoked."""
        row = _row(tenant, name, prefix, key_hash, now, role)

        async def add(connection: AsyncConnection) -> ApiKey:
            if await insert_unless_there(connection, api_keys, row):
                await write_extra_rows(connection, extra_rows)
            return await fetch_made(connection, ApiKey, _by_hash(key_hash))

        return await self._database.write(add)

    async def add_first_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey | None:
        """Insert the first key, which is an admin's, or return None if there is a key already.

        If several replicas start at the same time, only one replica succeeds.
        """
        row = _row(tenant, name, prefix, key_hash, now, "admin")

        async def add_first(connection: AsyncConnection) -> ApiKey | None:
            # The second insert waits for the first one's commit, and then sees its key.
            await insert_unless_there(connection, secrets, {"name": _FIRST_KEY, "value": b""})
            if await connection.scalar(select(exists().select_from(api_keys))):
                return None
            await insert_unless_there(connection, api_keys, row)
            return await fetch_made(connection, ApiKey, _by_hash(key_hash))

        return await self._database.write(add_first)

    async def find_key(self, key_hash: str) -> ApiKey | None:
        """Return the key with this hash, unless it is revoked."""
        return await self._look_up(ApiKey, _by_hash(key_hash).where(_valid()))

    async def get_key(self, key_id: int) -> ApiKey | None:
        """Return the key with this number, even if it is revoked."""
        return await self._look_up(ApiKey, select_records(api_keys, ApiKey).where(api_keys.c.key_id == key_id))

    async def list_keys(self, tenant: str | None = None) -> Sequence[ApiKey]:
        query = select_records(api_keys, ApiKey).order_by(api_keys.c.key_id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        return await self._read_all(ApiKey, query)

    async def revoke_key(
        self, key_id: int, now: datetime, extra_rows: ExtraRows = (), *, spares_last_admin: bool = False
    ) -> bool:
        """Revoke a key, and write the rows. A key that is already revoked does not change, and no row is written.

        With `spares_last_admin`, the only valid key of an admin stays valid, and the result is False.
        """
        this_one = update(api_keys).where(api_keys.c.key_id == key_id, _valid()).values(revoked_at=now)
        admins = select(api_keys.c.key_id).where(_valid(), api_keys.c.role == "admin").order_by(api_keys.c.key_id)

        async def revoke(connection: AsyncConnection) -> bool:
            # The second of two revocations waits here for the first, and then does not see its key any more.
            left = (await connection.scalars(admins.with_for_update())).all()
            if spares_last_admin and list(left) == [key_id]:
                return False
            if await changes_rows(connection, this_one):
                await write_extra_rows(connection, extra_rows)
            return True

        return await self._database.write(revoke)

    async def end_login(self, login_id: str, expires_at: datetime, now: datetime) -> None:
        """Record the end of a login of the console, and forget ended logins whose tokens have expired."""

        async def end(connection: AsyncConnection) -> None:
            await connection.execute(delete(ended_logins).where(ended_logins.c.expires_at <= now))
            await insert_unless_there(connection, ended_logins, {"login_id": login_id, "expires_at": expires_at})

        await self._database.write(end)

    async def is_login_ended(self, login_id: str) -> bool:
        return bool(await self._count(select(func.count()).where(ended_logins.c.login_id == login_id)))


def _row(tenant: str, name: str, prefix: str, key_hash: str, now: datetime, role: Role) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "name": name,
        "prefix": prefix,
        "key_hash": key_hash,
        "created_at": now,
        "role": role,
    }


def _by_hash(key_hash: str) -> Any:
    return select_records(api_keys, ApiKey).where(api_keys.c.key_hash == key_hash)


def _valid() -> ColumnElement[bool]:
    return api_keys.c.revoked_at.is_(None)
