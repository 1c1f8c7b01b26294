"""The submission of operations. An operation whose worker cannot be reached is deferred.

A deferred operation is durable in the store. It is delivered to the worker's journal when the worker can be reached,
before any later operation of its model. Without deferral, the SDK would give a training call up after 300 s, which is
shorter than the start of a large model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import (
    ModelNotAtWorker,
    StorageFull,
    Unprocessable,
    WorkerUnavailable,
)
from tinsmith_server.logs import get_logger
from tinsmith_server.services.delivery import PATIENCE_SECONDS, Delivery
from tinsmith_server.services.training.submit_requests import SubmitRequests
from tinsmith_server.store.records import DeferredOperation, Model
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import OperationId

log = get_logger(__name__)

# Most restarts of a worker are shorter. A deferral costs two transactions of the store.
DEFER_AFTER_SECONDS = 10.0
# A worker that was reached a moment ago answers within this time.
REACH_SECONDS = 1.0
# A training program seldom has more than some MiB in flight, but the store belongs to all tenants.
MOST_DEFERRED_BYTES = 256 * 2**20
MOST_DELIVERIES = 8


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted operation. `notice` tells the user why the operation waits."""

    operation: OperationId
    notice: str | None = None


class Submission:
    """The submission of operations to the journals of workers, or to the store."""

    def __init__(self, store: Store, delivery: Delivery, requests: SubmitRequests) -> None:
        self._store = store
        self._delivery = delivery
        self._requests = requests
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._deliveries = asyncio.Semaphore(MOST_DELIVERIES)

    async def submit(self, model: Model, request: worker_pb2.SubmitRequest) -> Accepted:
        """Submit the operation, and return when it is durable.

        An operation without a number is never deferred, because its worker assigns the number. Raises the errors of
        `Delivery.submit`. Raises WorkerUnavailable only for an operation that cannot be deferred.
        """
        try:
            number = await self._submit_now(model, request)
        except WorkerUnavailable as error:
            if not request.seq_id:
                raise
            return await self._defer(model, request, error)
        return Accepted(OperationId(model.model_id, number))

    async def deliver(self, model: Model) -> None:
        """Deliver the model's deferred operations in their order. Raises the errors of `Delivery.submit`.

        Several servers may deliver the same operations. A journal recognises an operation that it already has.
        """
        async with self._turn(model.model_id):
            while (deferred := await self._store.first_deferred_operation(model.model_id)) is not None:
                await self._deliver_one(model, deferred)
                await self._store.delete_deferred_operation(deferred.model_id, deferred.seq_id)

    async def deliver_all(self) -> None:
        """Deliver the deferred operations of all models whose workers can be reached."""
        models = await self._store.models_with_deferred_operations()
        await asyncio.gather(*(self._deliver_quietly(model) for model in models if model.state == "bound"))

    async def deliver_if_deferred(self, model: Model, seq_id: int) -> None:
        """Deliver the model's deferred operations if this operation is one of them."""
        if await self._store.is_deferred(model.model_id, seq_id):
            await self.deliver(model)

    async def _submit_now(self, model: Model, request: worker_pb2.SubmitRequest) -> int:
        patience_seconds = DEFER_AFTER_SECONDS if request.seq_id else PATIENCE_SECONDS
        if await self._store.has_deferred_operations(model.model_id):
            # A later operation would close the gap that a deferred operation leaves in the journal.
            await self.deliver(model)
        completed = await self._requests.completed(model, request, patience_seconds)
        return await self._delivery.submit(model.worker_id, completed, model.tenant, patience_seconds)

    async def _defer(self, model: Model, request: worker_pb2.SubmitRequest, cause: WorkerUnavailable) -> Accepted:
        """Store the operation. Raises the cause if the tenant's deferred operations use all of their space."""
        is_first = not await self._store.has_deferred_operations(model.model_id)
        body = request.SerializeToString()
        row = DeferredOperation(model.model_id, request.seq_id, model.tenant, len(body), body)
        if not await self._store.defer_operation(row, MOST_DEFERRED_BYTES):
            raise WorkerUnavailable(
                f"{cause}; {MOST_DEFERRED_BYTES // 2**20} MiB of your operations already wait for workers"
            ) from cause
        log.info("operation deferred", model_id=model.model_id, seq_id=request.seq_id, reason=str(cause))
        # A pipelined program defers many operations. One notice for a model is enough.
        return Accepted(OperationId(model.model_id, request.seq_id), str(cause) if is_first else None)

    async def _deliver_one(self, model: Model, deferred: DeferredOperation) -> None:
        request = worker_pb2.SubmitRequest.FromString(deferred.request)
        try:
            completed = await self._requests.completed(model, request, REACH_SECONDS)
            await self._delivery.submit(model.worker_id, completed, model.tenant, REACH_SECONDS)
        except Unprocessable as error:
            # The worker numbers this model's operations, so this operation can never be in the journal.
            log.warning("operation dropped", model_id=model.model_id, seq_id=deferred.seq_id, reason=str(error))

    async def _deliver_quietly(self, model: Model) -> None:
        async with self._deliveries:
            try:
                await self.deliver(model)
            except WorkerUnavailable:
                return
            except (ModelNotAtWorker, StorageFull) as error:
                log.warning("operations not delivered yet", model_id=model.model_id, reason=str(error))

    def _turn(self, model_id: str) -> asyncio.Lock:
        return self._turns.setdefault(model_id, asyncio.Lock())
