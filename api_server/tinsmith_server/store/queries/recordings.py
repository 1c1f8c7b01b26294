"""Queries about recordings of agents, and their turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import Queries, count, insert_into, newest_first, select_records, values
from tinsmith_server.store.records import Page, RecordedTurn, Recording
from tinsmith_server.store.tables import recorded_turns, recordings

# A batch is small, because other writes wait for it, and a recording may have many megabytes.
RECORDINGS_AT_ONCE = 20


class RecordingQueries(Queries):
    """The queries about recordings."""

    async def add_recording(self, recording: Recording, most_per_tenant: int) -> bool:
        """Add a recording. Returns False if the tenant has `most_per_tenant` recordings already."""
        of_tenant = select(func.count()).where(recordings.c.tenant == recording.tenant)

        async def add(connection: AsyncConnection) -> bool:
            if await count(connection, of_tenant) >= most_per_tenant:
                return False
            await connection.execute(insert_into(connection, recordings, values(recording)))
            return True

        return await self._database.write(add)

    async def recording(self, tenant: str, recording_id: str) -> Recording | None:
        query = select_records(recordings, Recording).where(_owned(tenant, recording_id))
        return await self._look_up(Recording, query)

    async def recorded_bytes(self, tenant: str) -> int:
        """Return the size of the tenant's recorded turns."""
        total = func.coalesce(func.sum(recordings.c.size_bytes), 0)
        return await self._count(select(total).where(recordings.c.tenant == tenant))

    async def list_recordings(self, tenant: str, limit: int, offset: int) -> Page[Recording]:
        query = (
            select_records(recordings, Recording)
            .where(recordings.c.tenant == tenant)
            .order_by(*newest_first(recordings.c.created_at, recordings.c.recording_id))
        )
        return await self._read_page(Recording, query, limit, offset)

    async def delete_recording(self, tenant: str, recording_id: str) -> bool:
        """Delete a recording with its turns. Returns False if the tenant does not have the recording."""

        async def remove(connection: AsyncConnection) -> bool:
            if not await count(connection, select(func.count()).where(_owned(tenant, recording_id))):
                return False
            await _delete(connection, [recording_id])
            return True

        return await self._database.write(remove)

    async def delete_expired_recordings(self, now: datetime) -> int:
        """Delete a few expired recordings. Return their number."""
        expired = select(recordings.c.recording_id).where(recordings.c.expires_at <= now).limit(RECORDINGS_AT_ONCE)
        found = await self._read_ids(expired)
        if found:
            await self._database.write(lambda connection: _delete(connection, found))
        return len(found)

    async def recorded_turns(self, recording_id: str) -> Sequence[RecordedTurn]:
        """Return the turns of a recording, in the order of their numbers."""
        query = select_records(recorded_turns, RecordedTurn).where(recorded_turns.c.recording_id == recording_id)
        return await self._read_all(RecordedTurn, query.order_by(recorded_turns.c.number))

    async def add_recorded_turns(self, recording_id: str, turns: Sequence[RecordedTurn]) -> Sequence[RecordedTurn]:
        """Add turns with the next numbers of the recording. Return the turns with their numbers.

        Returns no turns if the recording does not exist.
        """
        grow = (
            update(recordings)
            .where(recordings.c.recording_id == recording_id)
            .values(
                turns=recordings.c.turns + len(turns),
                size_bytes=recordings.c.size_bytes + sum(turn.size_bytes for turn in turns),
            )
            .returning(recordings.c.turns)
        )

        async def add(connection: AsyncConnection) -> Sequence[RecordedTurn]:
            total = (await connection.execute(grow)).scalar_one_or_none()
            if total is None:
                return ()
            first = int(total) - len(turns) + 1
            numbered = [replace(turn, number=first + place) for place, turn in enumerate(turns)]
            await connection.execute(insert_into(connection, recorded_turns, [values(turn) for turn in numbered]))
            return numbered

        return await self._database.write(add)


def _owned(tenant: str, recording_id: str) -> ColumnElement[bool]:
    return (recordings.c.recording_id == recording_id) & (recordings.c.tenant == tenant)


async def _delete(connection: AsyncConnection, recording_ids: Sequence[str]) -> None:
    # On PostgreSQL the lock makes a turn that is added at the same time wait; the turn then finds no recording.
    await connection.execute(
        select(recordings.c.recording_id).where(recordings.c.recording_id.in_(recording_ids)).with_for_update()
    )
    await connection.execute(delete(recorded_turns).where(recorded_turns.c.recording_id.in_(recording_ids)))
    await connection.execute(delete(recordings).where(recordings.c.recording_id.in_(recording_ids)))
