"""Queries about the whole installation: garbage, secrets, counts."""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import get_args

from sqlalchemy import Column, ColumnElement, delete, exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import Queries, insert_into, insert_unless_there
from tinsmith_server.store.records import CheckpointType, ModelState
from tinsmith_server.store.tables import checkpoints, garbage, models, secrets, sessions

_SECRET_BYTES = 32


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
