"""Ends sessions that have fallen silent, and frees what finished sessions still hold at the workers."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2

from tinsmith_server.errors import ModelNotAtWorker, TinsmithError
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.binding import Binding
from tinsmith_server.services.clock import Clock, utc_now
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.events import Events
from tinsmith_server.services.sessions import Sessions
from tinsmith_server.settings import Settings
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Model, Session

log = get_logger(__name__)

AUTOSAVE_NAME = "autosave"
BIND_SECONDS = 5.0
# A release runs behind everything the client has sent; the next round asks again.
RELEASE_WAIT_SECONDS = 2.0
# Rounds come every 15 s. After three missed ones nobody was here: the host slept, or the database was away.
ABSENCE = timedelta(seconds=45)


class Reaper:
    """Level-triggered: each round looks at the store and repeats what is not done yet."""

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        sessions: Sessions,
        binding: Binding,
        delivery: Delivery,
        events: Events,
        settings: Settings,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._binding = binding
        self._delivery = delivery
        self._events = events
        self._timeout = timedelta(seconds=settings.session_timeout_seconds)
        self._autosave_ttl_seconds = int(settings.autosave_ttl_seconds)
        self._clock = clock
        self._listening_since = self._last_round_at = clock()
        # What the log has said already: a worker may stay away for days.
        self._told: dict[str, str] = {}

    async def reap(self) -> None:
        """Only silence that could be heard counts: not what lies before the server's start, or in its host's sleep."""
        now = self._clock()
        if now - self._last_round_at > ABSENCE:
            self._listening_since = now
        self._last_round_at = now
        if now - self._listening_since < self._timeout:
            return
        last_heartbeat_before = now - self._timeout
        for session in await self._store.silent_sessions(last_heartbeat_before):
            await self._sessions.reap(session.session_id, last_heartbeat_before)

    async def release(self) -> None:
        sessions = await self._store.finished_sessions_with_live_models()
        models = [
            (session, model)
            for session in sessions
            for model in await self._store.models_of_session(session.session_id)
            if model.state in {"accepted", "bound"}
        ]
        await asyncio.gather(*(self._release_quietly(session, model) for session, model in models))

    async def _release_quietly(self, session: Session, model: Model) -> None:
        try:
            await self._release(session, model)
            self._told.pop(model.model_id, None)
        except TinsmithError as error:
            if self._told.get(model.model_id) != str(error):
                log.warning("model not released yet", model_id=model.model_id, reason=str(error))
            self._told[model.model_id] = str(error)

    async def _release(self, session: Session, model: Model) -> None:
        model = await self._binding.until_bound(model, BIND_SECONDS)
        if model.state != "bound":
            return
        request = worker_pb2.SubmitRequest(
            model_id=model.model_id,
            seq_id=RELEASE_SEQ_ID,
            kind=worker_pb2.RELEASE_MODEL,
            payload=self._payload(session).SerializeToString(),
        )
        try:
            await self._delivery.submit(model.worker_id, request)
            worker = await self._fleet.worker(model.worker_id).connection(RELEASE_WAIT_SECONDS)
            reply = await worker.await_result(model.model_id, RELEASE_SEQ_ID, RELEASE_WAIT_SECONDS)
        except ModelNotAtWorker:
            reply = worker_pb2.AwaitReply(gone=worker_pb2.Gone())
        if reply.WhichOneof("state") != "pending":
            # The autosave's record comes with the events, and must be there before the model is written off.
            await self._events.drain(model.worker_id)
            await self._store.set_model_state(model.model_id, "released")
            log.info("model released", model_id=model.model_id, session_id=session.session_id)

    def _payload(self, session: Session) -> worker_pb2.ReleaseModel:
        """Only a client that died without a word gets its work saved."""
        if session.finish_type != "reaped":
            return worker_pb2.ReleaseModel()
        return worker_pb2.ReleaseModel(
            final_checkpoint=worker_pb2.SaveWeights(
                kind=worker_pb2.TRAINING,
                name=AUTOSAVE_NAME,
                overwrite=True,
                ttl_seconds=self._autosave_ttl_seconds,
            )
        )
