"""Sampling sessions: what `asample` names, and which weights that means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select

from tinsmith_server.store.queries import Queries
from tinsmith_server.store.records import SamplingSession
from tinsmith_server.store.rows import select_records, values
from tinsmith_server.store.tables import sampling_sessions as table


class SamplingSessionQueries(Queries):
    """The part of `Store` about sampling sessions."""

    async def add_sampling_session(self, session: SamplingSession) -> SamplingSession:
        numbered = (table.c.session_id == session.session_id) & (
            table.c.sampling_session_seq_id == session.sampling_session_seq_id
        )
        return await self._insert_or_find(SamplingSession, table, values(session), _select().where(numbered))

    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSession | None:
        query = _select().where(table.c.sampling_session_id == sampling_session_id)
        return await self._read_one(SamplingSession, query)

    async def sampling_sessions_of(self, session_id: str) -> Sequence[SamplingSession]:
        query = _select().where(table.c.session_id == session_id).order_by(table.c.sampling_session_seq_id)
        return await self._read_all(SamplingSession, query)

    async def newest_inflight(self, model_id: str) -> SamplingSession | None:
        # By the client's own numbers: clocks of two replicas could turn two saves around.
        inflight = (table.c.model_id == model_id) & table.c.inflight
        query = _select().where(inflight).order_by(table.c.sampling_session_seq_id.desc()).limit(1)
        return await self._read_one(SamplingSession, query)


def _select() -> Select[Any]:
    return select_records(table, SamplingSession)
