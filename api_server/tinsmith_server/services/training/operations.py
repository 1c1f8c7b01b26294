"""Training operations.

The operations of a model are acknowledged in the order of their numbers, even if they are invalid. If an operation has
a valid model and number, it has a future, and every error of the request makes this future fail. A 4xx for one chunk of
a batch would block the SDK's training client permanently.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2

from tinsmith_server.errors import Gone, ModelNotAtWorker, Unprocessable, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.accounts.quotas import QueueQuota
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.services.delivery import PATIENCE_SECONDS, Delivery
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.models import Models
from tinsmith_server.services.training.submission import Accepted, Submission
from tinsmith_server.services.training.submit_requests import WHICH_OPERATION, SubmitRequests
from tinsmith_server.store.records import FINAL_STATES, Model
from tinsmith_server.wire.ids import OperationId
from tinsmith_server.wire.json_training import client_number

CREATION_SECONDS = 5.0


class Operations:
    """The submission of training operations.

    Each method returns the request ID, which depends only on the operation's number. If an operation has no number, the
    worker assigns a number. The same idempotency key always gets the same number.
    """

    def __init__(
        self,
        *,
        sessions: Sessions,
        models: Models,
        binding: Binding,
        delivery: Delivery,
        fleet: Fleet,
        requests: SubmitRequests,
        submission: Submission,
        queued: QueueQuota,
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._binding = binding
        self._delivery = delivery
        self._fleet = fleet
        self._requests = requests
        self._submission = submission
        self._queued = queued

    async def forward_backward(
        self, tenant: str, request: worker_pb2.SubmitRequest, key: str | None = None
    ) -> Accepted:
        """Submit a forward_backward.

        `request` is complete except for the epoch. The connection to the worker adds the epoch.
        """
        model = await self._ready_for_work(tenant, request.model_id)
        return await self._submit(model, request, key)

    async def optim_step(self, tenant: str, body: dict[str, Any], key: str | None = None) -> Accepted:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, self._requests.optim_step(model, seq_id, body), key)

    async def save_weights(self, tenant: str, body: dict[str, Any], key: str | None = None) -> Accepted:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, await self._requests.save_weights(model, seq_id, body), key)

    async def save_weights_for_sampler(self, tenant: str, body: dict[str, Any], key: str | None = None) -> Accepted:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, await self._requests.save_weights_for_sampler(model, seq_id, body), key)

    async def save_live(self, tenant: str, model_id: str, sampling_session_id: str, key: str | None = None) -> Accepted:
        """Save the weights for a new sampling session, after all operations that are accepted now."""
        model = await self._ready_for_work(tenant, model_id)
        return await self._submit(model, self._requests.save_live(model, sampling_session_id), key)

    async def save_weights_external(self, tenant: str, body: dict[str, Any], key: str | None = None) -> Accepted:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, await self._requests.save_weights_external(model, seq_id, body), key)

    async def load_weights(self, tenant: str, body: dict[str, Any], key: str | None = None) -> Accepted:
        """Load weights into the model with this model_id. Without a model_id, load the weights into a new model."""
        if body.get("model_id") is None:
            return Accepted(await self._models.create_by_load(tenant, body, key))
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, await self._requests.load_weights(model, seq_id, body), key)

    async def unload(self, tenant: str, model_id: str) -> OperationId:
        """End the model after its earlier operations. Weights that are not in a checkpoint are lost.

        If the model has already ended, the answer is the same, even if its session has ended, too.
        """
        if (await self._models.owned(tenant, model_id)).state in FINAL_STATES:
            return OperationId(model_id, RELEASE_SEQ_ID)
        model = await self._ready_for_work(tenant, model_id)
        if model.state == "bound":
            with suppress(ModelNotAtWorker):
                await self._submission.deliver(model)
                await self._delivery.release(model.worker_id, model_id, tenant)
        return OperationId(model_id, RELEASE_SEQ_ID)

    async def _addressed(self, tenant: str, body: dict[str, Any]) -> tuple[Model, int]:
        """Return the model and the operation's number, or 0 if the worker assigns the number."""
        model_id, seq_id = body.get("model_id"), client_number(body)
        if not isinstance(model_id, str) or seq_id is None:
            raise Unprocessable(WHICH_OPERATION)
        return await self._ready_for_work(tenant, model_id), seq_id

    async def _ready_for_work(self, tenant: str, model_id: str) -> Model:
        model = await self._models.at_work(tenant, model_id)
        await self._sessions.active(tenant, model.session_id)
        await self._models.touch(model_id)
        model = await self._binding.until_bound(model, PATIENCE_SECONDS)
        if model.state == "accepted":
            # Another replica may have bound the model while this replica still waits for a worker.
            model = await self._models.owned(tenant, model_id)
        if model.state == "accepted":
            # Operations that arrive before the creation would be refused as operations of a lost model.
            reason = self._binding.reason(model) or "its worker is still starting"
            raise WorkerUnavailable(f"{model_id} is not ready yet: {reason}")
        return model

    async def _submit(self, model: Model, request: worker_pb2.SubmitRequest, key: str | None) -> Accepted:
        """Submit the operation. If the model has ended, the operation's future returns the reason instead."""
        if not request.seq_id:
            # A key is set even without a client's key, because the worker must recognise a repeated submission.
            request.idempotency_key = key or uuid.uuid4().hex
        if model.state not in FINAL_STATES:
            try:
                return await self._submit_within_quota(model, request)
            except ModelNotAtWorker:
                model = await self._settle_missing(model)
        if not request.seq_id:
            raise Gone(f"{model.model_id} accepts no operations any more: {_why_ended(model)}")
        return Accepted(OperationId(request.model_id, request.seq_id))

    async def _submit_within_quota(self, model: Model, request: worker_pb2.SubmitRequest) -> Accepted:
        await self._queued.admit(model.tenant, model.model_id, request.seq_id)
        accepted = await self._submission.submit(model, request)
        self._queued.note(model.tenant, model.model_id, accepted.operation.seq_id)
        return accepted

    async def _settle_missing(self, model: Model) -> Model:
        current = await self._models.owned(model.tenant, model.model_id)
        if current.state == "released":
            raise Gone(_why_released(current, f"{model.model_id} has been released: its session is finished")) from None
        worker = await self._fleet.worker(model.worker_id).connection(CREATION_SECONDS)
        settled = await self._models.settle_missing(model, await worker.await_result(model.model_id, 0, 0))
        if settled.state == "bound":
            raise WorkerUnavailable(f"{model.model_id} is moving to another worker; send this again")
        return settled


def _why_ended(model: Model) -> str:
    if model.state == "released":
        return _why_released(model, "it has been released")
    return Failure.from_row(model.failure).message


def _why_released(model: Model, otherwise: str) -> str:
    return Failure.from_row(model.failure).message if model.failure is not None else otherwise
