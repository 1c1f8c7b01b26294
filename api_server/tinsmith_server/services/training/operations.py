"""Training operations: acknowledged whatever is in them, in the order of their numbers.

Once model_id and seq_id are readable a future exists, and everything wrong with the request fails
that future: a 4xx on one chunk of a batch would wedge the SDK's training client for good.
"""

from __future__ import annotations

from typing import Any

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import Gone, ModelNotAtWorker, Unprocessable, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.services.delivery import PATIENCE_SECONDS, Delivery
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.models import Models
from tinsmith_server.services.training.payloads import Payload, Payloads
from tinsmith_server.store.records import Model
from tinsmith_server.wire.head import Head
from tinsmith_server.wire.ids import OperationId, is_operation_number

CREATION_SECONDS = 5.0


class Operations:
    """Every method answers the request id of the operation, the same one for the same number."""

    def __init__(
        self,
        sessions: Sessions,
        models: Models,
        binding: Binding,
        delivery: Delivery,
        fleet: Fleet,
        payloads: Payloads,
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._binding = binding
        self._delivery = delivery
        self._fleet = fleet
        self._payloads = payloads

    async def forward_backward(
        self, tenant: str, head: Head, body: bytes, *, zstd: bool, problem: str | None
    ) -> OperationId:
        """`body` is the SDK's message as it came; with `problem` it is dropped and its place kept."""
        model = await self._ready_for_work(tenant, head.model_id, head.seq_id)
        payload = (
            Payload.rejected(worker_pb2.FORWARD_BACKWARD, problem)
            if problem
            else Payload(worker_pb2.FORWARD_BACKWARD, body, zstd=zstd)
        )
        return await self._submit(model, head.seq_id, payload)

    async def optim_step(self, tenant: str, body: dict[str, Any]) -> OperationId:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, seq_id, self._payloads.optim_step(body))

    async def save_weights(self, tenant: str, body: dict[str, Any]) -> OperationId:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, seq_id, await self._payloads.save_weights(model, body))

    async def save_weights_for_sampler(self, tenant: str, body: dict[str, Any]) -> OperationId:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, seq_id, await self._payloads.save_weights_for_sampler(model, body))

    async def save_weights_external(self, tenant: str, body: dict[str, Any]) -> OperationId:
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, seq_id, await self._payloads.save_weights_external(model, body))

    async def load_weights(self, tenant: str, body: dict[str, Any]) -> OperationId:
        """With a model_id into that model, else into a new one."""
        if body.get("model_id") is None:
            return await self._models.create_by_load(tenant, body)
        model, seq_id = await self._addressed(tenant, body)
        return await self._submit(model, seq_id, await self._payloads.load_weights(model, body))

    async def _addressed(self, tenant: str, body: dict[str, Any]) -> tuple[Model, int]:
        model_id, seq_id = body.get("model_id"), body.get("seq_id")
        if not isinstance(model_id, str) or not isinstance(seq_id, int):
            raise Unprocessable("model_id and seq_id are needed to know which operation this is")
        return await self._ready_for_work(tenant, model_id, seq_id), seq_id

    async def _ready_for_work(self, tenant: str, model_id: str, seq_id: int) -> Model:
        if not is_operation_number(seq_id):
            raise Unprocessable(f"seq_id must be a positive 64-bit number, not {seq_id}")
        model = await self._models.at_work(tenant, model_id)
        await self._sessions.active(tenant, model.session_id)
        await self._models.touch(model_id)
        model = await self._binding.until_bound(model, PATIENCE_SECONDS)
        if model.state == "accepted":
            # Work that came before the create would be refused as work for a model that the worker has lost.
            reason = self._binding.reason(model) or "its worker is still starting"
            raise WorkerUnavailable(f"{model_id} is not ready for work yet: {reason}")
        return model

    async def _submit(self, model: Model, seq_id: int, payload: Payload) -> OperationId:
        """A model that is no more gets no work; its futures say why when they are asked for."""
        operation = OperationId(model.model_id, seq_id)
        if model.state in {"failed", "corrupted", "released"}:
            return operation
        request = worker_pb2.SubmitRequest(
            model_id=model.model_id,
            seq_id=seq_id,
            kind=payload.kind,
            payload=payload.body,
            zstd=payload.zstd,
            rejection=payload.rejection,
        )
        try:
            await self._delivery.submit(model.worker_id, request)
        except ModelNotAtWorker:
            await self._settle_missing(model)
        return operation

    async def _settle_missing(self, model: Model) -> None:
        current = await self._models.owned(model.tenant, model.model_id)
        if current.state == "released":
            raise Gone(f"{model.model_id} has been released: its session is over") from None
        worker = await self._fleet.worker(model.worker_id).connection(CREATION_SECONDS)
        settled = await self._models.settle_missing(model, await worker.await_result(model.model_id, 0, 0))
        if settled.state == "bound":
            raise WorkerUnavailable(f"{model.model_id} was not at its worker a moment ago; send this again")
