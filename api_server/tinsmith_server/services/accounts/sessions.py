"""Sessions.

A session is one run of a client program. The calls and heartbeats of the program keep the session alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from tinsmith_server.errors import Gone, NotFound, Unprocessable
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.callers import acting_key_id
from tinsmith_server.services.accounts.tokens import tenant_urn
from tinsmith_server.services.rows import RowCache, in_steps, owned_session
from tinsmith_server.store.records import CheckpointTotals, Clock, FinishType, Session, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import OWN_SESSION, is_own_session, own_session_id
from tinsmith_server.wire.requests import CreateSessionRequest, FinishReason, FinishSessionRequest
from tinsmith_server.wire.search import ClientFinishedQuery, SessionSearchRequest, StatusQuery, UserOwner

log = get_logger(__name__)

# After another replica ends a session, this replica may accept work for the session for this long.
ACTIVE_SECONDS = 1.0
# A second call within this time is not written to the store, if the timeout is several times longer. Each write has a
# cost, and a thousand clients make a hundred calls a second.
SIGN_OF_LIFE_SECONDS = 30.0
SIGNS_IN_A_TIMEOUT = 4
# The retention of sessions made for samples. Each sample with an idempotency key leaves such a session, which holds
# only the key.
OWN_SESSION_RETENTION = timedelta(days=1)


class Sessions:
    """The sessions of an installation. `finished` is set whenever a session ends at this server."""

    def __init__(self, store: Store, timeout_seconds: float, clock: Clock = utc_now) -> None:
        """Start.

        A session without a call for `timeout_seconds` is ended.
        """
        self._store = store
        self._clock = clock
        self._active: RowCache[str, Session] = RowCache(ACTIVE_SECONDS)
        sign_seconds = min(SIGN_OF_LIFE_SECONDS, timeout_seconds / SIGNS_IN_A_TIMEOUT)
        self._sign = timedelta(seconds=sign_seconds)
        self._recent_calls: RowCache[str, bool] = RowCache(sign_seconds)
        self.finished = asyncio.Event()

    async def create(self, tenant: str, request: CreateSessionRequest, idempotency_key: str | None) -> Session:
        """Create a session. Raises Unprocessable if the idempotency key was used with another request."""
        keyed = keyed_request(idempotency_key, request.model_dump(mode="json", exclude_unset=True))
        return await self._create(f"sess-{uuid.uuid4().hex}", tenant, request, keyed)

    async def create_for_one(self, tenant: str, keyed: KeyedRequest | None) -> Session:
        """Create a session for one model or sampling client of a program that does not use sessions.

        The calls of the model or client keep the session alive. Raises the errors of `create`.
        """
        return await self._create(own_session_id(), tenant, CreateSessionRequest(), keyed)

    async def _create(
        self, session_id: str, tenant: str, request: CreateSessionRequest, keyed: KeyedRequest | None
    ) -> Session:
        now = self._clock()
        session = Session(
            session_id=session_id,
            tenant=tenant,
            created_at=now,
            last_heartbeat_at=now,
            tags=tuple(request.tags),
            user_metadata=request.user_metadata,
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
            request_digest=keyed.digest if keyed else None,
            key_id=acting_key_id(),
        )
        made = await self._store.create_session(session, keyed.key if keyed else None)
        if keyed is not None:
            check_repeats(made, keyed)
        log.info("session created", session_id=made.session_id, tenant=tenant, sdk_version=request.sdk_version)
        return made

    async def owned(self, tenant: str, session_id: str) -> Session:
        """Return the session. Raises NotFound for an unknown session, and for another tenant's session."""
        return await owned_session(self._store, tenant, session_id)

    async def active(self, tenant: str, session_id: str) -> Session:
        """Return a session that may take new work. Raises NotFound, and Gone for a finished session."""
        session = self._active.get(session_id)
        if session is None or session.tenant != tenant:
            session = await self.owned(tenant, session_id)
            if session.finished_at is not None:
                raise Gone(_over(session))
            self._active.put(session_id, session)
        await self.note_call(session_id)
        return session

    async def note_call(self, session_id: str) -> None:
        """Record a call as a sign of life. The session must belong to the caller."""
        if is_own_session(session_id) and not self._recent_calls.get(session_id):
            self._recent_calls.put(session_id, True)
            await self._store.heartbeat(session_id, self._clock())

    async def heartbeat(self, tenant: str, session_id: str) -> None:
        """Record a heartbeat.

        Raises Gone only for a finished session, because the SDK sends no more heartbeats after a 410.
        """
        session, now = await self.owned(tenant, session_id), self._clock()
        if session.finished_at is None and now - session.last_heartbeat_at >= self._sign:
            session = await self._store.heartbeat(session_id, now) or session
        if session.finished_at is not None:
            raise Gone(_over(session))

    async def finish(self, tenant: str, session_id: str, request: FinishSessionRequest) -> None:
        """Finish a session. Only the first call has an effect. Later calls get the same answer."""
        await self.owned(tenant, session_id)
        finish_type = request.reason.type
        finished = await self._store.finish_session(session_id, finish_type, request.detail, self._clock())
        self._active.forget(session_id)
        if finished:
            self._announce(session_id, finish_type)

    async def finish_own(self, tenant: str, session_id: str) -> None:
        """Finish a session that was created for one model. A session that a client has created stays open."""
        if is_own_session(session_id):
            await self.finish(tenant, session_id, FinishSessionRequest(reason=FinishReason(type="success")))

    async def reap(self, session_id: str, last_heartbeat_before: datetime) -> None:
        """End a session that had no recent call. If a call has arrived in the meantime, the session stays open."""
        now, why = self._clock(), "no heartbeat"
        if await self._store.finish_silent_session(session_id, "reaped", why, now, last_heartbeat_before):
            self._active.forget(session_id)
            self._announce(session_id, "reaped")

    async def sweep(self) -> None:
        """Delete each session that contains only samples, one day after the end of the session.

        Sessions of models are kept, together with the models' checkpoints.
        """
        finished_before = self._clock() - OWN_SESSION_RETENTION
        forgotten = await self._store.delete_sessions_without_models(OWN_SESSION, finished_before)
        if forgotten:
            log.info("sessions of samples forgotten", sessions=forgotten)

    def _announce(self, session_id: str, type: FinishType) -> None:
        log.info("session finished", session_id=session_id, finish_type=type)
        self.finished.set()

    async def list_ids(self, tenant: str, limit: int, offset: int) -> list[str]:
        page = await in_steps(partial(self._store.list_sessions, tenant), limit, offset)
        return [session.session_id for session in page.rows]

    async def contents(self, session_id: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the IDs of the session's models and sampling sessions, ordered by their numbers."""
        models = await self._store.model_ids_of_session(session_id)
        return models, await self._store.sampler_ids_of_session(session_id)


def _over(session: Session) -> str:
    why = {
        "reaped": "it sent no heartbeat for too long; its models were saved, see `tinker checkpoint list`",
        "success": "the client closed it",
        "errored": "the client closed it after an error",
        "interrupted": "the client was interrupted",
    }
    return f"session {session.session_id} is finished: {why[session.finish_type or 'success']}"


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """An idempotency key, and the digest of its request."""

    key: str
    digest: str


def keyed_request(key: str | None, content: object) -> KeyedRequest | None:
    """Return the idempotency key with the digest of the request, or None without an idempotency key.

    `content` is the complete request as JSON.
    """
    if key is None:
        return None
    return KeyedRequest(key, hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest())


def check_repeats(made: Session, request: KeyedRequest) -> None:
    """Raise Unprocessable if the session of this idempotency key was made by another request.

    This check does not answer 409, because the SDK would retry for minutes after a 409.
    """
    if made.request_digest != request.digest:
        raise Unprocessable(
            f"the idempotency key {request.key.partition(':')[2]!r} was used for another request: send each request "
            "with a new key"
        )


LOOKED_THROUGH = 1000
"""The number of sessions that one request reads in a search.

The matching sessions form one page, and the next request continues after the last session that was read.
"""
AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class FoundSession:
    session: Session
    kept: CheckpointTotals


@dataclass(frozen=True, slots=True)
class SearchPage:
    """A page of found sessions. `behind` is the position of the next page, or None if this is the last page."""

    found: Sequence[FoundSession]
    behind: tuple[datetime, str] | None


class SessionSearch:
    """The search among a tenant's own sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def search(self, tenant: str, request: SessionSearchRequest) -> SearchPage:
        if isinstance(request.owner, UserOwner) and tenant_urn(tenant) not in request.owner.owner_urns:
            return SearchPage((), None)
        found, behind = await self._matching(tenant, request)
        kept = await self._store.checkpoint_totals_of_sessions([session.session_id for session in found])
        return SearchPage(
            [FoundSession(one, kept.get(one.session_id, CheckpointTotals(0, 0))) for one in found], behind
        )

    async def _matching(
        self, tenant: str, request: SessionSearchRequest
    ) -> tuple[Sequence[Session], tuple[datetime, str] | None]:
        cursor = request.cursor
        behind = None if cursor is None else (cursor.last_created_at, cursor.last_session_id)
        found: list[Session] = []
        for _ in range(LOOKED_THROUGH // AT_ONCE):
            rows = await self._store.sessions_after(tenant, behind, AT_ONCE)
            for session in rows:
                behind = session.created_at, session.session_id
                if matches(session, request):
                    found.append(session)
                    if len(found) == request.limit:
                        return found, behind
            if len(rows) < AT_ONCE:
                return found, None
        return found, behind

    async def assign_project(self, tenant: str, session_id: str, project_id: str) -> None:
        """Assign a session to a project. Raises NotFound."""
        if not await self._store.assign_project(tenant, session_id, project_id):
            raise NotFound(f"there is no session {session_id}")


def matches(session: Session, request: SessionSearchRequest) -> bool:
    """Return whether the session meets all conditions. If an ID and a name are given, the ID or the name must match."""
    metadata = session.user_metadata
    return (
        _is_named(session, request)
        and (request.project_ids is None or session.project_id in request.project_ids)
        and all(metadata.get(key) == value for key, value in request.user_metadata.items())
        and (request.statuses is None or any(_has_status(session, status) for status in request.statuses))
    )


def _is_named(session: Session, request: SessionSearchRequest) -> bool:
    if request.session_id is None and request.display_name is None:
        return True
    if session.session_id == request.session_id:
        return True
    name = (session.display_name or "").casefold()
    return request.display_name is not None and all(word in name for word in request.display_name.casefold().split())


def _has_status(session: Session, status: StatusQuery | ClientFinishedQuery) -> bool:
    """Return whether the session has the status.

    A session that ended because of missing heartbeats counts as cancelled.

    A session never fails; only models fail.
    """
    if isinstance(status, StatusQuery):
        holds = {"active": session.finished_at is None, "cancelled": session.finish_type == "reaped", "failed": False}
        return holds[status.type]
    reported = session.finished_at is not None and session.finish_type != "reaped"
    return reported and (status.reasons is None or session.finish_type in status.reasons)
