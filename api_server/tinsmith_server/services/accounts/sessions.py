"""Sessions: one run of a client program each, alive as long as it gives signs of life."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from tinsmith_server.errors import Gone
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.keyed_requests import KeyedRequest, check_repeats, keyed_request
from tinsmith_server.services.accounts.ownership import owned_session
from tinsmith_server.services.paging import in_steps
from tinsmith_server.services.row_cache import RowCache
from tinsmith_server.store.records import Clock, FinishType, Session, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import OWN_SESSION, is_own_session, own_session_id
from tinsmith_server.wire.requests import CreateSessionRequest, FinishReason, FinishSessionRequest

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
