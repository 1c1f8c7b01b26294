"""Queries about sessions and their sampling sessions. A session is one run of a client program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Select, Update, bindparam, delete, exists, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import Queries, fetch_one, newest_first, select_records, values
from tinsmith_server.store.records import FinishType, Page, SamplingSession, Session
from tinsmith_server.store.tables import models, sampling_sessions, sessions

# A batch is small, because other writes wait for it.
SESSIONS_AT_ONCE = 500

_OF_KEY = select_records(sessions, Session).where(
    sessions.c.tenant == bindparam("tenant"), sessions.c.idempotency_key == bindparam("idempotency_key")
)
_BY_ID = select_records(sessions, Session).where(sessions.c.session_id == bindparam("session_id"))


class SessionQueries(Queries):
    """The queries about sessions."""

    async def create_session(self, session: Session, idempotency_key: str | None) -> Session:
        """Insert a session. If this tenant has used the idempotency key before, return the session of that request."""
        made = _BY_ID if idempotency_key is None else _OF_KEY
        row = {**values(session), "idempotency_key": idempotency_key}
        return await self._insert_or_find(Session, sessions, row, made, row)

    async def session_of_key(self, tenant: str, idempotency_key: str) -> Session | None:
        return await self._look_up(Session, _OF_KEY, {"tenant": tenant, "idempotency_key": idempotency_key})

    async def get_session(self, session_id: str) -> Session | None:
        return await self._look_up(Session, _BY_ID, {"session_id": session_id})

    async def list_sessions(self, tenant: str, limit: int, offset: int) -> Page[Session]:
        query = (
            select_records(sessions, Session)
            .where(sessions.c.tenant == tenant)
            .order_by(*newest_first(sessions.c.created_at, sessions.c.session_id))
        )
        return await self._read_page(Session, query, limit, offset)

    async def sessions_after(self, tenant: str, position: tuple[datetime, str] | None, limit: int) -> Sequence[Session]:
        """Return the sessions after a position (creation time and ID), newest first.

        Without a position, start at the newest session.
        """
        age = sessions.c.created_at, sessions.c.session_id
        query = select_records(sessions, Session).where(sessions.c.tenant == tenant)
        if position is not None:
            query = query.where(tuple_(*age) < tuple_(*position))
        return await self._read_all(Session, query.order_by(*newest_first(*age)).limit(limit))

    async def projects_among(self, tenant: str, project_ids: Collection[str]) -> Collection[str]:
        """Return those of the projects to which a session of the tenant is assigned."""
        query = (
            select(sessions.c.project_id)
            .distinct()
            .where(sessions.c.tenant == tenant, sessions.c.project_id.in_(project_ids))
        )

        async def read(connection: AsyncConnection) -> Collection[str]:
            return [str(row[0]) for row in await connection.execute(query)]

        return await self._database.read(read)

    async def session_names(self, session_ids: Collection[str]) -> Mapping[str, str]:
        """Return the display names of those sessions that have one."""
        query = select(sessions.c.session_id, sessions.c.display_name).where(
            sessions.c.session_id.in_(session_ids), sessions.c.display_name.is_not(None)
        )

        async def read(connection: AsyncConnection) -> Mapping[str, str]:
            return {str(session_id): str(name) for session_id, name in await connection.execute(query)}

        return await self._database.read(read)

    async def assign_project(self, tenant: str, session_id: str, project_id: str) -> bool:
        """Assign the session to a project. Returns False if the tenant does not have the session."""
        owned = (sessions.c.session_id == session_id) & (sessions.c.tenant == tenant)
        return await self._write(update(sessions).where(owned).values(project_id=project_id))

    async def heartbeat(self, session_id: str, now: datetime) -> Session | None:
        """Record a sign of life, unless the session is finished. Return the session."""
        alive = (sessions.c.session_id == session_id) & sessions.c.finished_at.is_(None)
        beat = update(sessions).where(alive, sessions.c.last_heartbeat_at < now).values(last_heartbeat_at=now)

        async def beat_and_look(connection: AsyncConnection) -> Session | None:
            await connection.execute(beat)
            return await fetch_one(connection, Session, _BY_ID, {"session_id": session_id})

        return await self._database.write(beat_and_look)

    async def finish_session(self, session_id: str, type: FinishType, detail: str | None, now: datetime) -> bool:
        """Finish the session. Returns False if the session is already finished or does not exist."""
        return await self._write(_finish(session_id, type, detail, now))

    async def finish_silent_session(
        self, session_id: str, type: FinishType, detail: str | None, now: datetime, last_heartbeat_before: datetime
    ) -> bool:
        """Finish the session if its last sign of life is older than `last_heartbeat_before`.

        Returns False if the last sign of life is newer, or if the session is already finished.
        """
        return await self._write(_finish(session_id, type, detail, now).where(_silent(last_heartbeat_before)))

    async def silent_sessions(self, last_heartbeat_before: datetime) -> Sequence[Session]:
        """Return the unfinished sessions with a last sign of life before this time."""
        silent = sessions.c.finished_at.is_(None) & _silent(last_heartbeat_before)
        query = select_records(sessions, Session).where(silent).order_by(sessions.c.last_heartbeat_at)
        return await self._read_all(Session, query)

    async def finished_sessions_with_live_models(self) -> Sequence[Session]:
        """Return finished sessions that have accepted or bound models. The release of these models must be repeated."""
        live = models.c.state.in_(("accepted", "bound"))
        with_live_model = exists().where(models.c.session_id == sessions.c.session_id, live)
        query = (
            select_records(sessions, Session)
            .where(sessions.c.finished_at.is_not(None), with_live_model)
            .order_by(sessions.c.finished_at)
        )
        return await self._read_all(Session, query)

    async def delete_sessions_without_models(self, prefix: str, finished_before: datetime) -> int:
        """Delete finished sessions that have this ID prefix and no models. Return the number of deleted sessions.

        The idempotency keys and sampling sessions of a deleted session are deleted, too. One transaction deletes a few
        hundred sessions.
        """
        # SQLite's LIKE ignores case.
        named = func.substr(sessions.c.session_id, 1, len(prefix)) == prefix
        with_model = exists().where(models.c.session_id == sessions.c.session_id)
        over = sessions.c.finished_at < finished_before
        found = await self._read_ids(select(sessions.c.session_id).where(named, over, ~with_model))
        for first in range(0, len(found), SESSIONS_AT_ONCE):
            await self._database.write(partial(_forget, found[first : first + SESSIONS_AT_ONCE]))
        return len(found)


class SamplingSessionQueries(Queries):
    """The queries about sampling sessions."""

    async def add_sampling_session(self, session: SamplingSession) -> SamplingSession:
        """Insert a sampling session.

        If a sampling session with the same (session_id, sampling_session_seq_id) exists, return the existing one.
        """
        numbered = (sampling_sessions.c.session_id == session.session_id) & (
            sampling_sessions.c.sampling_session_seq_id == session.sampling_session_seq_id
        )
        return await self._insert_or_find(
            SamplingSession, sampling_sessions, values(session), _select_sampling().where(numbered)
        )

    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSession | None:
        query = _select_sampling().where(sampling_sessions.c.sampling_session_id == sampling_session_id)
        return await self._look_up(SamplingSession, query)

    async def add_sampling_client(self, sampling_session_id: str) -> int:
        """Return the next number for a client of an existing sampling session. The first number is 1."""
        clients = func.coalesce(sampling_sessions.c.clients, 0) + 1
        one_more = (
            update(sampling_sessions)
            .where(sampling_sessions.c.sampling_session_id == sampling_session_id)
            .values(clients=clients)
            .returning(sampling_sessions.c.clients)
        )

        async def join(connection: AsyncConnection) -> int:
            return int((await connection.execute(one_more)).scalar_one())

        return await self._database.write(join)

    async def sampler_ids_of_session(self, session_id: str) -> Sequence[str]:
        of_session = select(sampling_sessions.c.sampling_session_id).where(sampling_sessions.c.session_id == session_id)
        return await self._read_ids(of_session.order_by(sampling_sessions.c.sampling_session_seq_id))

    async def newest_inflight(self, model_id: str) -> SamplingSession | None:
        # Saves are ordered by the client's numbers, because the clocks of two replicas could reverse their order.
        inflight = (sampling_sessions.c.model_id == model_id) & sampling_sessions.c.inflight
        query = _select_sampling().where(inflight).order_by(sampling_sessions.c.sampling_session_seq_id.desc()).limit(1)
        return await self._look_up(SamplingSession, query)


async def _forget(session_ids: Sequence[str], connection: AsyncConnection) -> None:
    """Delete the sessions, unless they have models.

    A finished session can get no new models, so sessions without models stay without models.
    """
    await connection.execute(delete(sampling_sessions).where(sampling_sessions.c.session_id.in_(session_ids)))
    await connection.execute(delete(sessions).where(sessions.c.session_id.in_(session_ids)))


def _finish(session_id: str, type: FinishType, detail: str | None, now: datetime) -> Update:
    unfinished = (sessions.c.session_id == session_id) & sessions.c.finished_at.is_(None)
    return update(sessions).where(unfinished).values(finished_at=now, finish_type=type, finish_detail=detail)


def _silent(last_heartbeat_before: datetime) -> ColumnElement[bool]:
    return sessions.c.last_heartbeat_at < last_heartbeat_before


def _select_sampling() -> Select[Any]:
    return select_records(sampling_sessions, SamplingSession)
