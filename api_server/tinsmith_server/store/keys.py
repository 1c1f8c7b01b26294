"""API keys, known by the hash of their secret."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries import Queries
from tinsmith_server.store.records import ApiKey
from tinsmith_server.store.rows import fetch_made, insert_unless_there, select_records
from tinsmith_server.store.tables import api_keys, secrets

_FIRST_KEY = "first key"


class KeyQueries(Queries):
    """The part of `Store` about keys and tenants."""

    async def add_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey:
        row = {"tenant": tenant, "name": name, "prefix": prefix, "key_hash": key_hash, "created_at": now}
        by_hash = select_records(api_keys, ApiKey).where(api_keys.c.key_hash == key_hash)
        return await self._insert_or_find(ApiKey, api_keys, row, by_hash)

    async def add_first_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey | None:
        row = {"tenant": tenant, "name": name, "prefix": prefix, "key_hash": key_hash, "created_at": now}
        by_hash = select_records(api_keys, ApiKey).where(api_keys.c.key_hash == key_hash)

        async def add_first(connection: AsyncConnection) -> ApiKey | None:
            # Whoever inserts this row second waits for the first one's commit, and then sees its key.
            await insert_unless_there(connection, secrets, {"name": _FIRST_KEY, "value": b""})
            if await connection.scalar(select(exists().select_from(api_keys))):
                return None
            await insert_unless_there(connection, api_keys, row)
            return await fetch_made(connection, ApiKey, by_hash)

        return await self._database.write(add_first)

    async def find_key(self, key_hash: str) -> ApiKey | None:
        valid = (api_keys.c.key_hash == key_hash) & api_keys.c.revoked_at.is_(None)
        return await self._read_one(ApiKey, select_records(api_keys, ApiKey).where(valid))

    async def list_keys(self, tenant: str | None = None) -> Sequence[ApiKey]:
        query = select_records(api_keys, ApiKey).order_by(api_keys.c.key_id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        return await self._read_all(ApiKey, query)

    async def revoke_key(self, key_id: int, now: datetime) -> bool:
        first_revoked_at = func.coalesce(api_keys.c.revoked_at, now)
        return await self._write(
            update(api_keys).where(api_keys.c.key_id == key_id).values(revoked_at=first_revoked_at)
        )
