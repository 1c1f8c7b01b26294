"""The binding of accepted models to workers. Until a worker has created a model, only the store has a record of it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import ModelNotAtWorker, StorageFull, TinsmithError, WorkerAbsent, WorkerUnstartable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.training.placement import Placement
from tinsmith_server.services.training.slot_assignment import Wait
from tinsmith_server.store.records import Model
from tinsmith_server.store.store import Store

log = get_logger(__name__)

RETRY_SECONDS = 1.0
# The time limit of an attempt at one worker. After it, another worker is chosen.
ATTEMPT_SECONDS = 5.0
# The first poll for a model returns the reason after this time. Later polls return it at the end of their hold.
FIRST_WORD_SECONDS = 2.0


class Binding:
    """The tasks that bind accepted models to workers.

    Each model has one task until the model is bound or has failed.
    """

    def __init__(self, store: Store, fleet: Fleet, placement: Placement, delivery: Delivery) -> None:
        self._store = store
        self._fleet = fleet
        self._placement = placement
        self._delivery = delivery
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # The current row of each model, so that its waiters need not read the store.
        self._models: dict[str, Model] = {}
        self._reported: set[str] = set()
        self._reasons: dict[str, TinsmithError] = {}
        # The workers whose full disk is already logged, because every waiting model tries again each second.
        self._refusing: set[str] = set()

    async def resume(self) -> None:
        """Start tasks for the models that an earlier run of the server, or another replica, had accepted."""
        for model in await self._store.accepted_models():
            self.start(model)

    def start(self, model: Model) -> None:
        """Start the task of the model, unless the task runs already."""
        _ = self._task(model)

    def _task(self, model: Model) -> asyncio.Task[None]:
        task = self._tasks.get(model.model_id)
        if task is None:
            task = asyncio.create_task(self._bind(model), name=f"bind {model.model_id}", context=contextvars.Context())
            self._tasks[model.model_id], self._models[model.model_id] = task, model
            task.add_done_callback(lambda _: self._forget(model.model_id))
        return task

    def _forget(self, model_id: str) -> None:
        for known in (self._tasks, self._models, self._reasons):
            known.pop(model_id, None)
        self._reported.discard(model_id)

    async def until_bound(self, model: Model, timeout_seconds: float) -> Model:
        """Return the model when it is bound. After the timeout, return the model in its current state."""
        if model.state != "accepted":
            return model
        done, _ = await asyncio.wait({self._task(model)}, timeout=max(timeout_seconds, 0))
        return (await self._store.get_model(model.model_id) or model) if done else model

    async def wait_until_bound(self, model: Model, timeout_seconds: float) -> Model:
        """Return the model as `until_bound` does. If there is a reason to report, the first call returns early."""
        if model.state == "accepted" and model.model_id not in self._reported and timeout_seconds > FIRST_WORD_SECONDS:
            model = await self.until_bound(model, FIRST_WORD_SECONDS)
            if model.state != "accepted" or self.reason(model) is not None:
                self._reported.add(model.model_id)
                return model
            timeout_seconds -= FIRST_WORD_SECONDS
        return await self.until_bound(model, timeout_seconds)

    def note_free(self) -> None:
        """Record that a slot may be free."""
        self._placement.note_free()

    def on_its_way(self, model_id: str) -> Model | None:
        """Return the accepted model with this ID if this replica is binding it."""
        return self._models.get(model_id)

    def reason(self, model: Model) -> str | None:
        """Return the reason why a model is not bound yet. The client of the model sees this text."""
        current = self._models.get(model.model_id, model)
        if current.worker_id:
            return self._why_not_brought(current)
        return self._placement.reason(model) or self._why_not_brought(current)

    async def waits_of(self, models: Sequence[Model]) -> Mapping[str, Wait]:
        """Return what each of these models waits for. The models are not bound yet, at any replica."""
        placed = await self._placement.waits([model for model in models if not model.worker_id])
        found = {}
        for model in models:
            wait = placed.get(model.model_id, Wait(None))
            found[model.model_id] = replace(wait, reason=wait.reason or self._why_not_brought(model))
        return found

    def _why_not_brought(self, model: Model) -> str | None:
        """Return the reason why the model is not at its worker yet.

        If the worker is not ready, the worker's reason is newer than the reason of the last attempt.
        """
        try:
            reason = self._fleet.worker(model.worker_id).unavailable_reason if model.worker_id else None
        except WorkerAbsent as absent:
            reason = str(absent)
        error = self._reasons.get(model.model_id)
        return reason or (str(error) if error is not None else None)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._placement.close()

    async def _bind(self, model: Model) -> None:
        refused_by: set[str] = set()
        while model.state == "accepted":
            model = self._models[model.model_id] = await self._step(model, refused_by)

    async def _step(self, model: Model, refused_by: set[str]) -> Model:
        """Do the next step for the model, and return the model in its new state."""
        try:
            if not model.worker_id:
                return await self._placement.wait_until_placed(model, refused_by)
            if self._placement.may_stay(model):
                return await self._bring(model, refused_by)
            return await self._displace(model)
        except TinsmithError as error:
            self._reasons[model.model_id] = error
            await asyncio.sleep(RETRY_SECONDS)
            # The next step reads the store, which shows whether the model still has its slot.
            return replace(model, worker_id="")

    async def _bring(self, model: Model, refused_by: set[str]) -> Model:
        """Submit the operation that creates the model. Raises TinsmithError if another attempt may help."""
        try:
            await self._delivery.submit(model.worker_id, _creation(model), model.tenant, ATTEMPT_SECONDS)
        except (WorkerUnstartable, ModelNotAtWorker) as error:
            return await self._fail(model, f"{model.base_model} cannot be served: {error}")
        except StorageFull as error:
            refused_by.add(model.worker_id)
            self._note_refusal(model, error)
            await self._displaced(model)
            raise
        self._note_room(model.worker_id)
        if not await self._store.bind_model(model.model_id, model.worker_id):
            return replace(model, worker_id="")
        with suppress(WorkerAbsent):
            self._fleet.worker(model.worker_id).note_bound()
        log.info("model bound", model_id=model.model_id, worker_id=model.worker_id)
        return replace(model, state="bound")

    def _note_refusal(self, model: Model, error: StorageFull) -> None:
        if model.worker_id not in self._refusing:
            self._refusing.add(model.worker_id)
            log.warning(
                "worker refuses new models", worker_id=model.worker_id, model_id=model.model_id, reason=str(error)
            )

    def _note_room(self, worker_id: str) -> None:
        if worker_id in self._refusing:
            self._refusing.remove(worker_id)
            log.info("worker accepts new models again", worker_id=worker_id)

    async def _displace(self, model: Model) -> Model:
        """Take the model from its worker.

        A worker that has accepted the model despite an error reports the model as an event.
        """
        reason = "its worker no longer accepts new models"
        log.info("model displaced", model_id=model.model_id, worker_id=model.worker_id, reason=reason)
        await self._displaced(model)
        return replace(model, worker_id="")

    async def _displaced(self, model: Model) -> None:
        await self._store.displace_model(model.model_id, model.worker_id)
        self._placement.note_free()

    async def _fail(self, model: Model, reason: str) -> Model:
        """Mark the model as failed, unless another worker has created the model."""
        await self._displaced(model)
        failure = Failure("server", reason).to_row()
        if not await self._store.end_model(model.model_id, "failed", failure, only_unplaced=True):
            return replace(model, worker_id="")
        log.error("model failed", model_id=model.model_id, reason=reason)
        return replace(model, state="failed")


def _creation(model: Model) -> worker_pb2.SubmitRequest:
    kind = worker_pb2.CREATE_MODEL if model.create_kind == "create" else worker_pb2.LOAD_MODEL
    return worker_pb2.SubmitRequest(model_id=model.model_id, seq_id=0, kind=kind, payload=model.create_payload)
