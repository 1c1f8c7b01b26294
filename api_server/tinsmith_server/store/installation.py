"""What belongs to the whole installation: garbage, secrets, counts."""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Mapping, Sequence
from typing import get_args

from sqlalchemy import Column, ColumnElement, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries import Queries
from tinsmith_server.store.records import CheckpointType, ModelState
from tinsmith_server.store.rows import insert_unless_there
from tinsmith_server.store.tables import checkpoints, garbage, models, secrets, sessions

_SECRET_BYTES = 32


class GarbageQueries(Queries):
    """The part of `Store` about files that no name points to any more."""

    async def list_garbage(self) -> Sequence[str]:
        async def directories(connection: AsyncConnection) -> Sequence[str]:
            return (await connection.scalars(select(garbage.c.directory).order_by(garbage.c.garbage_id))).all()

        return await self._database.read(directories)

    async def remove_garbage(self, directory: str) -> None:
        await self._write(delete(garbage).where(garbage.c.directory == directory))


class InstallationQueries(Queries):
    """The part of `Store` that every replica must agree on."""

    async def secret(self, name: str) -> bytes:
        row = {"name": name, "value": random_secrets.token_bytes(_SECRET_BYTES)}

        async def draw_once(connection: AsyncConnection) -> bytes:
            await insert_unless_there(connection, secrets, row)
            stored = select(secrets.c.value).where(secrets.c.name == name)
            return bytes((await connection.execute(stored)).scalar_one())

        return await self._database.write(draw_once)

    async def check(self) -> None:
        await self._database.answers()

    async def counts(self) -> Mapping[str, int]:
        return await self._database.read(_count)


async def _count(connection: AsyncConnection) -> dict[str, int]:
    states = await _count_by(connection, models.c.state)
    types = await _count_by(connection, checkpoints.c.type, checkpoints.c.deleted_at.is_(None))
    active = select(func.count()).select_from(sessions).where(sessions.c.finished_at.is_(None))
    # Every state is named: a gauge that vanishes at zero looks like a scrape that failed.
    return {
        **{f"models.{state}": states.get(state, 0) for state in get_args(ModelState)},
        "sessions.active": (await connection.execute(active)).scalar_one(),
        **{f"checkpoints.{type}": types.get(type, 0) for type in get_args(CheckpointType)},
    }


async def _count_by(connection: AsyncConnection, column: Column[str], *where: ColumnElement[bool]) -> dict[str, int]:
    rows = await connection.execute(select(column, func.count()).where(*where).group_by(column))
    return dict(rows.all())
