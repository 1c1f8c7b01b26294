"""Accepted models and their way to a worker: the store is their journal until the worker has them."""

from __future__ import annotations

import asyncio
import contextvars

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import ModelNotAtWorker, ModelUnloadable, TinsmithError
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.failures import Failure
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Model

log = get_logger(__name__)

RETRY_SECONDS = 1.0


class Binding:
    """One task per accepted model, until it is bound or has failed."""

    def __init__(self, store: Store, fleet: Fleet, delivery: Delivery) -> None:
        self._store = store
        self._fleet = fleet
        self._delivery = delivery
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[str, str] = {}

    async def resume(self) -> None:
        """Takes up what an earlier run of the server had accepted."""
        for worker in self._fleet.workers:
            for model in await self._store.models_of_worker(worker.worker_id, ["accepted"]):
                self.start(model)

    def start(self, model: Model) -> None:
        """Idempotent."""
        _ = self._task(model)

    def _task(self, model: Model) -> asyncio.Task[None]:
        task = self._tasks.get(model.model_id)
        if task is None:
            task = asyncio.create_task(self._bind(model), name=f"bind {model.model_id}", context=contextvars.Context())
            self._tasks[model.model_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(model.model_id, None))
        return task

    async def until_bound(self, model: Model, timeout_seconds: float) -> Model:
        """The model as it is when the worker has it, or has not in time."""
        if model.state == "accepted":
            await asyncio.wait({self._task(model)}, timeout=max(timeout_seconds, 0))
            return await self._store.get_model(model.model_id) or model
        return model

    def reason(self, model_id: str) -> str | None:
        """Why a model is not bound yet, for the one who waits for it."""
        return self._reasons.get(model_id)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bind(self, model: Model) -> None:
        kind = worker_pb2.CREATE_MODEL if model.create_kind == "create" else worker_pb2.LOAD_MODEL
        request = worker_pb2.SubmitRequest(model_id=model.model_id, seq_id=0, kind=kind, payload=model.create_payload)
        while True:
            try:
                await self._delivery.submit(model.worker_id, request)
                await self._store.set_model_state(model.model_id, "bound")
                log.info("model bound", model_id=model.model_id, worker_id=model.worker_id)
                break
            except (ModelUnloadable, ModelNotAtWorker) as error:
                failure = Failure("server", f"{model.base_model} cannot be served: {error}")
                await self._store.set_model_state(model.model_id, "failed", failure.to_row())
                log.error("model failed", model_id=model.model_id, reason=failure.message)
                break
            except TinsmithError as error:
                self._reasons[model.model_id] = str(error)
                await asyncio.sleep(RETRY_SECONDS)
        self._reasons.pop(model.model_id, None)
