"""Sessions: one run of a client program each, alive as long as it gives signs of life."""

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
from tinsmith_server.services.accounts.keys import tenant_urn
from tinsmith_server.services.rows import RowCache, in_steps, owned_session
from tinsmith_server.store.records import Clock, FinishType, Kept, Session, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import OWN_SESSION, is_own_session, own_session_id
from tinsmith_server.wire.requests import CreateSessionRequest, FinishReason, FinishSessionRequest
from tinsmith_server.wire.session_search import ClientFinishedQuery, SessionSearchRequest, StatusQuery, UserOwner

log = get_logger(__name__)

# How long work may still be taken here after another replica has seen the session end.
ACTIVE_SECONDS = 1.0
# A sign of life within so long of one that was noted is not noted again, as long as several fit into the timeout: each
# note is a write, and a thousand clients beat a hundred times a second.
SIGN_OF_LIFE_SECONDS = 30.0
SIGNS_IN_A_TIMEOUT = 4
# Of those that samples had for themselves: they hold nothing that anybody could come back for but a key, and each
# sample with a key leaves one.
OWN_SESSION_RETENTION = timedelta(days=1)


class Sessions:
    """`finished` is set whenever a session ends here, for whoever frees what it held."""

    def __init__(self, store: Store, timeout_seconds: float, clock: Clock = utc_now) -> None:
        """`timeout_seconds`: a session that is silent for longer is ended."""
        self._store = store
        self._clock = clock
        self._active: RowCache[str, Session] = RowCache(ACTIVE_SECONDS)
        sign_seconds = min(SIGN_OF_LIFE_SECONDS, timeout_seconds / SIGNS_IN_A_TIMEOUT)
        self._sign = timedelta(seconds=sign_seconds)
        self._heard: RowCache[str, bool] = RowCache(sign_seconds)
        self.finished = asyncio.Event()

    async def create(self, tenant: str, request: CreateSessionRequest, idempotency_key: str | None) -> Session:
        """Raises Unprocessable where the key has come with another request."""
        keyed = keyed_request(idempotency_key, request.model_dump(mode="json", exclude_unset=True))
        return await self._create(f"sess-{uuid.uuid4().hex}", tenant, request, keyed)

    async def create_for_one(self, tenant: str, keyed: KeyedRequest | None) -> Session:
        """For one model, or one sampling client, of a program that asks for no session: its calls keep it alive.

        Raises as `create` does.
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
        )
        made = await self._store.create_session(session, keyed.key if keyed else None)
        if keyed is not None:
            check_repeats(made, keyed)
        log.info("session created", session_id=made.session_id, tenant=tenant, sdk_version=request.sdk_version)
        return made

    async def owned(self, tenant: str, session_id: str) -> Session:
        """Raises NotFound, also for another tenant's session."""
        return await owned_session(self._store, tenant, session_id)

    async def active(self, tenant: str, session_id: str) -> Session:
        """A session that can take new work. Raises NotFound, and Gone once it is finished."""
        session = self._active.get(session_id)
        if session is None or session.tenant != tenant:
            session = await self.owned(tenant, session_id)
            if session.finished_at is not None:
                raise Gone(_over(session))
            self._active.put(session_id, session)
        await self.note_call(session_id)
        return session

    async def note_call(self, session_id: str) -> None:
        """A call is a sign of life where nobody sends heartbeats. Only of a session that is the caller's."""
        if is_own_session(session_id) and not self._heard.get(session_id):
            self._heard.put(session_id, True)
            await self._store.heartbeat(session_id, self._clock())

    async def heartbeat(self, tenant: str, session_id: str) -> None:
        """Raises Gone only for a finished session: after a 410 the SDK never beats again."""
        session, now = await self.owned(tenant, session_id), self._clock()
        if session.finished_at is None and now - session.last_heartbeat_at >= self._sign:
            session = await self._store.heartbeat(session_id, now) or session
        if session.finished_at is not None:
            raise Gone(_over(session))

    async def finish(self, tenant: str, session_id: str, request: FinishSessionRequest) -> None:
        """The first finish wins; later ones are answered the same and change nothing."""
        await self.owned(tenant, session_id)
        finish_type = request.reason.type
        finished = await self._store.finish_session(session_id, finish_type, request.detail, self._clock())
        self._active.forget(session_id)
        if finished:
            self._announce(session_id, finish_type)

    async def finish_own(self, tenant: str, session_id: str) -> None:
        """Its one model is done with. A session that a client asked for goes on."""
        if is_own_session(session_id):
            await self.finish(tenant, session_id, FinishSessionRequest(reason=FinishReason(type="success")))

    async def reap(self, session_id: str, last_heartbeat_before: datetime) -> None:
        """Ends a session for its silence. One that has given a sign of life in the meantime goes on."""
        now, why = self._clock(), "no heartbeat"
        if await self._store.finish_silent_session(session_id, "reaped", why, now, last_heartbeat_before):
            self._active.forget(session_id)
            self._announce(session_id, "reaped")

    async def sweep(self) -> None:
        """Forgets own sessions of samples, a day after their end. Those of models stay, for what these have kept."""
        finished_before = self._clock() - OWN_SESSION_RETENTION
        forgotten = await self._store.forget_sessions_without_models(OWN_SESSION, finished_before)
        if forgotten:
            log.info("sessions of samples forgotten", sessions=forgotten)

    def _announce(self, session_id: str, type: FinishType) -> None:
        log.info("session finished", session_id=session_id, finish_type=type)
        self.finished.set()

    async def list_ids(self, tenant: str, limit: int, offset: int) -> list[str]:
        page = await in_steps(partial(self._store.list_sessions, tenant), limit, offset)
        return [session.session_id for session in page.rows]

    async def contents(self, session_id: str) -> tuple[Sequence[str], Sequence[str]]:
        """The ids of its models and of its sampling sessions, in the order of their numbers."""
        models = await self._store.model_ids_of_session(session_id)
        return models, await self._store.sampler_ids_of_session(session_id)


def _over(session: Session) -> str:
    why = {
        "reaped": "no heartbeat arrived for too long; its models were saved, see `tinker checkpoint list`",
        "success": "the client closed it",
        "errored": "the client closed it after an error",
        "interrupted": "the client was interrupted",
    }
    return f"session {session.session_id} is finished: {why[session.finish_type or 'success']}"


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """An idempotency key, with the digest of the request that it came with."""

    key: str
    digest: str


def keyed_request(key: str | None, content: object) -> KeyedRequest | None:
    """Return the request's identity; `content` is all that the request says, as JSON. None without a key."""
    if key is None:
        return None
    return KeyedRequest(key, hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest())


def check_repeats(made: Session, request: KeyedRequest) -> None:
    """Raise Unprocessable where another request made the session of this key. The SDK repeats a 409 for minutes."""
    if made.request_digest != request.digest:
        raise Unprocessable(
            f"the idempotency key {request.key.partition(':')[2]!r} has come with another request: "
            "send each request with a key of its own"
        )


LOOKED_THROUGH = 1000
"""Sessions that one request looks at: what it has found until then is its page, and the next goes on behind it."""
AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class FoundSession:
    session: Session
    kept: Kept


@dataclass(frozen=True, slots=True)
class SearchPage:
    """`behind`: where the next one begins; None: nothing is left."""

    found: Sequence[FoundSession]
    behind: tuple[datetime, str] | None


class SessionSearch:
    """Reads; what it finds is the tenant's own, whoever is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def search(self, tenant: str, request: SessionSearchRequest) -> SearchPage:
        if isinstance(request.owner, UserOwner) and tenant_urn(tenant) not in request.owner.owner_urns:
            return SearchPage((), None)
        found, behind = await self._matching(tenant, request)
        kept = await self._store.kept_of_sessions([session.session_id for session in found])
        return SearchPage([FoundSession(one, kept.get(one.session_id, Kept(0, 0))) for one in found], behind)

    async def _matching(
        self, tenant: str, request: SessionSearchRequest
    ) -> tuple[Sequence[Session], tuple[datetime, str] | None]:
        cursor = request.cursor
        behind = None if cursor is None else (cursor.last_created_at, cursor.last_session_id)
        found: list[Session] = []
        for _ in range(LOOKED_THROUGH // AT_ONCE):
            rows = await self._store.sessions_behind(tenant, behind, AT_ONCE)
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
        """Raises NotFound."""
        if not await self._store.assign_project(tenant, session_id, project_id):
            raise NotFound(f"there is no session {session_id}")


def matches(session: Session, request: SessionSearchRequest) -> bool:
    """All that is asked for holds; of an id and a name either one."""
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
    """One that was ended for its silence counts as cancelled. Sessions here do not fail: their models do."""
    if isinstance(status, StatusQuery):
        holds = {"active": session.finished_at is None, "cancelled": session.finish_type == "reaped", "failed": False}
        return holds[status.type]
    reported = session.finished_at is not None and session.finish_type != "reaped"
    return reported and (status.reasons is None or session.finish_type in status.reasons)
