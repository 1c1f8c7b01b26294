"""Queries about the whole installation: API keys, garbage, secrets, counts."""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import get_args

from sqlalchemy import Column, ColumnElement, delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import Queries, fetch_made, insert_into, insert_unless_there, select_records
from tinsmith_server.store.records import ApiKey, CheckpointType, ModelState
from tinsmith_server.store.tables import api_keys, checkpoints, garbage, models, secrets, sessions

_FIRST_KEY = "first key"
_SECRET_BYTES = 32


class KeyQueries(Queries):
    """The queries about keys."""

    async def add_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey:
        """Insert a key. If a key with this hash exists, return the existing key, even if it is revoked."""
        row = {"tenant": tenant, "name": name, "prefix": prefix, "key_hash": key_hash, "created_at": now}
        by_hash = select_records(api_keys, ApiKey).where(api_keys.c.key_hash == key_hash)
        return await self._insert_or_find(ApiKey, api_keys, row, by_hash)

    async def add_first_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey | None:
        """Insert the first key, or return None if there is a key already.

        If several replicas start at the same time, only one replica succeeds.
        """
        row = {"tenant": tenant, "name": name, "prefix": prefix, "key_hash": key_hash, "created_at": now}
        by_hash = select_records(api_keys, ApiKey).where(api_keys.c.key_hash == key_hash)

        async def add_first(connection: AsyncConnection) -> ApiKey | None:
            # The second insert waits for the first one's commit, and then sees its key.
            await insert_unless_there(connection, secrets, {"name": _FIRST_KEY, "value": b""})
            if await connection.scalar(select(exists().select_from(api_keys))):
                return None
            await insert_unless_there(connection, api_keys, row)
            return await fetch_made(connection, ApiKey, by_hash)

        return await self._database.write(add_first)

    async def find_key(self, key_hash: str) -> ApiKey | None:
        """Return the key with this hash, unless it is revoked."""
        valid = (api_keys.c.key_hash == key_hash) & api_keys.c.revoked_at.is_(None)
        return await self._look_up(ApiKey, select_records(api_keys, ApiKey).where(valid))

    async def list_keys(self, tenant: str | None = None) -> Sequence[ApiKey]:
        query = select_records(api_keys, ApiKey).order_by(api_keys.c.key_id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        return await self._read_all(ApiKey, query)

    async def revoke_key(self, key_id: int, now: datetime) -> bool:
        """Revoke a key, even if it is already revoked. Returns False if the key does not exist."""
        first_revoked_at = func.coalesce(api_keys.c.revoked_at, now)
        return await self._write(
            update(api_keys).where(api_keys.c.key_id == key_id).values(revoked_at=first_revoked_at)
        )


class GarbageQueries(Queries):
    """The queries about directories without a record."""

    async def list_garbage(self, now: datetime) -> Sequence[str]:
        """Return the directories that have lost their record, and unused directories with an expired reservation."""
        within = func.substr(checkpoints.c.directory, 1, func.length(garbage.c.directory) + 1)
        is_named = (checkpoints.c.directory == garbage.c.directory) | (within == garbage.c.directory + "/")
        named = exists().where(is_named, checkpoints.c.deleted_at.is_(None))
        due = garbage.c.due_at.is_(None) | ((garbage.c.due_at <= now) & ~named)
        return await self._read_ids(select(garbage.c.directory).where(due).order_by(garbage.c.garbage_id))

    async def reserve_directory(self, directory: str, until: datetime) -> None:
        """Reserve a directory before files are written in or below it.

        A record of the directory ends the reservation. From the time `until` on, the directory is garbage, unless the
        directory or a directory below has a record.
        """

        async def reserve(connection: AsyncConnection) -> None:
            statement = insert_into(connection, garbage, {"directory": directory, "due_at": until})
            later = statement.on_conflict_do_update(
                index_elements=[garbage.c.directory],
                set_={"due_at": until},
                # A directory that lost its record stays garbage.
                where=garbage.c.due_at.is_not(None),
            )
            await connection.execute(later)

        await self._database.write(reserve)

    async def remove_garbage(self, directory: str) -> None:
        await self._write(delete(garbage).where(garbage.c.directory == directory))


class InstallationQueries(Queries):
    """The queries about values that all replicas share."""

    async def secret(self, name: str) -> bytes:
        """Return the 32 random bytes that belong to this name.

        The bytes are drawn once, and every replica gets the same bytes.
        """
        row = {"name": name, "value": random_secrets.token_bytes(_SECRET_BYTES)}

        async def draw_once(connection: AsyncConnection) -> bytes:
            await insert_unless_there(connection, secrets, row)
            stored = select(secrets.c.value).where(secrets.c.name == name)
            return bytes((await connection.execute(stored)).scalar_one())

        return await self._database.write(draw_once)

    async def check(self) -> None:
        """Return when the database has answered. The database is asked only once."""
        await self._database.answers()

    async def counts(self) -> Mapping[str, int]:
        """Return the number of rows in each state: `models.<state>`, `sessions.active`, `checkpoints.<type>`."""
        return await self._database.read(_count)


async def _count(connection: AsyncConnection) -> dict[str, int]:
    states = await _count_by(connection, models.c.state)
    types = await _count_by(connection, checkpoints.c.type, checkpoints.c.deleted_at.is_(None))
    active = select(func.count()).select_from(sessions).where(sessions.c.finished_at.is_(None))
    # Every state is present, because a gauge that vanishes at zero looks like a failed scrape.
    return {
        **{f"models.{state}": states.get(state, 0) for state in get_args(ModelState)},
        "sessions.active": (await connection.execute(active)).scalar_one(),
        **{f"checkpoints.{type}": types.get(type, 0) for type in get_args(CheckpointType)},
    }


async def _count_by(connection: AsyncConnection, column: Column[str], *where: ColumnElement[bool]) -> dict[str, int]:
    rows = await connection.execute(select(column, func.count()).where(*where).group_by(column))
    return dict(rows.all())
