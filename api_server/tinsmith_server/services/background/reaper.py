"""The reaper of silent sessions, expired recordings and lost workers.

The reaper ends silent sessions, and ends models with a permanently lost worker.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2

from tinsmith_server.errors import ModelNotAtWorker, TinsmithError
from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.services.checkpoints.worker_events import Events
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.failures import AUTOSAVE_NAME, Failure, why_evacuated
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.submission import Submission
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Clock, Model, utc_now
from tinsmith_server.store.store import Store

log = get_logger(__name__)

# A suspended or absent worker must not delay the others: the next round asks again.
REACH_SECONDS = 5.0
# A release waits for everything that the client has submitted; the next round asks again.
RELEASE_WAIT_SECONDS = 2.0
# Rounds run every 15 s. Three missed rounds mean that no server was running: the host slept, or the database was
# unreachable.
ABSENCE = timedelta(seconds=45)

CURE = "its checkpoints are kept: list them with `tinker checkpoint list`, and resume from the last one"


class Reaper:
    """A task that ends silent sessions and releases their models.

    Each round reads the store, and repeats work that was not finished.
    """

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        sessions: Sessions,
        binding: Binding,
        delivery: Delivery,
        submission: Submission,
        events: Events,
        freed: Changes,
        settings: Settings,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._binding = binding
        self._delivery = delivery
        self._submission = submission
        self._events = events
        self._freed = freed
        self._timeout = timedelta(seconds=settings.session_timeout_seconds)
        self._autosave_ttl_seconds = int(settings.autosave_ttl_seconds)
        self._clock = clock
        # The last logged reason for each worker, because a worker may be absent for days.
        self._logged: dict[str, str] = {}

    async def listen(self) -> None:
        """Begin to measure how long clients are silent."""
        await self._store.record_round("reaper", self._clock(), ABSENCE)

    async def reap(self) -> None:
        """End silent sessions.

        Silence counts only while a server is running. The time before a server's start does not count, nor does the
        time while the host sleeps.
        """
        # The clock is read once. If the host slept between two readings, its sleep would count as silence.
        now = self._clock()
        listening_since = await self._store.record_round("reaper", now, ABSENCE)
        if now - listening_since < self._timeout:
            return
        last_heartbeat_before = now - self._timeout
        for session in await self._store.silent_sessions(last_heartbeat_before):
            await self._sessions.reap(session.session_id, last_heartbeat_before)

    async def release(self) -> None:
        sessions = await self._store.finished_sessions_with_live_models()
        # Work is saved only if the client died without ending its session.
        models = [
            (model, session.finish_type == "reaped")
            for session in sessions
            for model in await self._store.live_models_of_session(session.session_id)
        ]
        await asyncio.gather(*(self._release_quietly(model, save=save) for model, save in models))

    async def evacuate(self) -> None:
        """Save and release the models of workers that will be removed soon."""
        models = [
            (model, why_evacuated(model.model_id, leaving))
            for worker in self._fleet.workers
            if (leaving := worker.leaving) is not None
            for model in await self._store.models_of_worker(worker.worker_id, ["bound"])
        ]
        await asyncio.gather(*(self._release_quietly(model, save=True, reason=reason) for model, reason in models))

    async def delete_expired_recordings(self) -> None:
        """Delete the recordings of agents whose time is over."""
        while count := await self._store.delete_expired_recordings(self._clock()):
            log.info("expired recordings deleted", count=count)

    async def _release_quietly(self, model: Model, *, save: bool, reason: str = "") -> None:
        try:
            await self._release(model, save=save, reason=reason)
            self._logged.pop(model.model_id, None)
        except TinsmithError as error:
            if self._logged.get(model.model_id) != str(error):
                log.warning("model not released yet", model_id=model.model_id, reason=str(error))
            self._logged[model.model_id] = str(error)

    async def _release(self, model: Model, *, save: bool, reason: str) -> None:
        if not model.worker_id:
            # If another replica has just placed the model, the next round releases the model at its worker.
            await self._end(model, only_unplaced=True)
            return
        model = await self._binding.until_bound(model, REACH_SECONDS)
        if model.state != "bound":
            return
        autosave = self._autosave() if save else None
        try:
            await self._submission.deliver(model)
            await self._delivery.release(
                model.worker_id, model.model_id, model.tenant, autosave, REACH_SECONDS, reason=reason
            )
            worker = await self._fleet.worker(model.worker_id).connection(RELEASE_WAIT_SECONDS)
            reply = await worker.await_result(model.model_id, RELEASE_SEQ_ID, RELEASE_WAIT_SECONDS)
        except ModelNotAtWorker:
            reply = worker_pb2.AwaitReply(gone=worker_pb2.Gone())
        if reply.WhichOneof("state") != "pending":
            # The autosave's record and the reason arrive as events. They must be in the store before the model ends.
            await self._events.drain(model.worker_id)
            await self._end(model)

    async def _end(self, model: Model, *, only_unplaced: bool = False) -> None:
        if await self._store.end_model(model.model_id, "released", only_unplaced=only_unplaced):
            self._freed.note()
            log.info("model released", model_id=model.model_id, session_id=model.session_id)

    def _autosave(self) -> worker_pb2.SaveWeights:
        return worker_pb2.SaveWeights(
            kind=worker_pb2.TRAINING, name=AUTOSAVE_NAME, overwrite=True, ttl_seconds=self._autosave_ttl_seconds
        )


class LostWorkers:
    """A task that ends the models of lost workers. A suspended or unreachable worker is not lost."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def write_off(self) -> None:
        """End the models that are bound to lost workers.

        Models that are only accepted are placed again by `Binding`.
        """
        for worker in await self._store.workers_with_live_models():
            reason = await self._fleet.permanently_lost_reason(worker)
            if reason is not None:
                await self._corrupt_models(worker.worker_id, reason)

    async def _corrupt_models(self, worker_id: str, reason: str) -> None:
        for model in await self._store.models_of_worker(worker_id, ["bound"]):
            failure = Failure("server", f"{model.model_id} is lost: {reason}; {CURE}")
            await self._store.end_model(model.model_id, "corrupted", failure.to_row())
            log.error("model corrupted", model_id=model.model_id, worker_id=worker_id, reason=reason)
