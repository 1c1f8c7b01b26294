"""Models. Each model has one adapter, one optimizer and one queue of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import Unprocessable
from tinsmith_server.fleet.base import Fleet, ServedModel
from tinsmith_server.logs import bind_ids, get_logger
from tinsmith_server.services.accounts.quotas import AdapterQuota
from tinsmith_server.services.accounts.sessions import Sessions, keyed_request
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.rows import RowCache, owned_model
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.model_creation import Creation, creation_by_load, creation_from_scratch
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Clock, Model, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import OperationId, is_client_counter, model_id_of
from tinsmith_server.wire.responses import SupportedModel, WaitingModel

log = get_logger(__name__)

TOUCH_SECONDS = 30.0
# A worker itself reports that it no longer holds a model, even if this cache contains the model.
BOUND_SECONDS = 1.0
WAITING_SHOWN = 20


class Models:
    """The models of an installation. The creation of a model is stored before it is acknowledged.

    The server then sends the stored creation to a worker.
    """

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        sessions: Sessions,
        binding: Binding,
        lookup: CheckpointLookup,
        adapters: AdapterQuota,
        describe: Callable[[ServedModel], SupportedModel],
        settings: Settings,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._binding = binding
        self._lookup = lookup
        self._adapters = adapters
        self._describe = describe
        self._lora_alpha = settings.lora_alpha
        self._clock = clock
        self._touched: RowCache[str, bool] = RowCache(TOUCH_SECONDS)
        self._bound: RowCache[str, Model] = RowCache(BOUND_SECONDS)

    async def create(self, tenant: str, body: dict[str, Any], key: str | None = None) -> OperationId:
        """Create a model. Errors that occur after the IDs are known make the model's future fail.

        If the request has no session, the model gets a new session. The same idempotency key gives the same session.
        """
        session_id, number = await self._place(tenant, body, key)
        creation = creation_from_scratch(body, self._fleet, self._lora_alpha, self._describe)
        return await self._accept(tenant, session_id, number, creation)

    async def create_by_load(self, tenant: str, body: dict[str, Any], key: str | None = None) -> OperationId:
        """Create a model with the LoRA settings of a checkpoint.

        This method serves calls of `load_weights` without a model.
        """
        session_id, number = await self._place(tenant, body, key)
        creation = await creation_by_load(tenant, body, self._fleet, self._lookup)
        return await self._accept(tenant, session_id, number, creation)

    async def owned(self, tenant: str, model_id: str) -> Model:
        """Return the model. Raises NotFound for an unknown model, and for another tenant's model."""
        return await owned_model(self._store, tenant, model_id)

    async def at_work(self, tenant: str, model_id: str) -> Model:
        """Return the model as `owned` does. The state may be one second old."""
        model = self._bound.get(model_id) or self._binding.on_its_way(model_id)
        if model is not None and model.tenant == tenant:
            bind_ids(session_id=model.session_id, model_id=model_id)
        else:
            model = await self.owned(tenant, model_id)
            if model.state == "bound":
                self._bound.put(model_id, model)
        await self._sessions.note_call(model.session_id)
        return model

    async def waiting(self, tenant: str) -> list[WaitingModel]:
        """Return the tenant's models without a worker, oldest first, with the reason for each wait."""
        now = self._clock()
        models = await self._store.unbound_models(tenant, WAITING_SHOWN)
        waits = await self._binding.waits_of(models)
        return [
            WaitingModel(
                model_id=model.model_id,
                base_model=model.base_model,
                waiting_seconds=max(0.0, (now - model.created_at).total_seconds()),
                reason=waits[model.model_id].reason,
                queue_position=waits[model.model_id].number,
            )
            for model in models
        ]

    def served_as(self, model: Model) -> ServedModel | None:
        return self._fleet.model(model.base_model)

    async def touch(self, model_id: str) -> None:
        """Record the time of the last request, at most every TOUCH_SECONDS.

        A pipelined run sends hundreds of requests a second.
        """
        if not self._touched.get(model_id):
            self._touched.put(model_id, True)
            await self._store.touch_model(model_id, self._clock())

    async def fail(self, model: Model, failure: Failure) -> None:
        """Mark the model as failed."""
        await self._store.end_model(model.model_id, "failed", failure.to_row())
        self._binding.note_free()

    async def end(self, model: Model) -> None:
        """Mark the model as released by its worker, and free the slot that it holds."""
        await self._store.end_model(model.model_id, "released")
        self._binding.note_free()

    async def settle_missing(self, model: Model, creation: worker_pb2.AwaitReply) -> Model:
        """End a bound model that its worker does not hold: the creation failed, or the worker's volume is lost.

        `creation` is the worker's answer for operation 0. The model ends only if it is bound and `creation` is a
        failure or "not found". Returns the current model.
        """
        model = await self._store.get_model(model.model_id) or model
        if model.state != "bound":
            return model
        state = creation.WhichOneof("state")
        if state == "failure":
            await self.fail(model, Failure.from_worker(creation.failure))
        elif state == "not_found":
            message = f"the worker of {model.model_id} has lost its volume; load the model's last checkpoint"
            log.error("model corrupted", model_id=model.model_id, reason=message)
            await self._store.end_model(model.model_id, "corrupted", Failure("server", message).to_row())
        return await self._store.get_model(model.model_id) or model

    async def _place(self, tenant: str, body: dict[str, Any], key: str | None) -> tuple[str, int]:
        session_id, number = body.get("session_id"), body.get("model_seq_id")
        if session_id is None and number is None:
            session_id, number = (await self._sessions.create_for_one(tenant, keyed_request(key, body))).session_id, 0
        if not isinstance(session_id, str) or not isinstance(number, int) or not is_client_counter(number):
            raise Unprocessable("session_id and model_seq_id are needed to identify the model")
        await self._sessions.active(tenant, session_id)
        return session_id, number

    async def _accept(self, tenant: str, session_id: str, number: int, creation: Creation) -> OperationId:
        async with self._adapters.one_more(tenant) as refusal:
            if refusal is not None and creation.failure is None:
                creation = replace(creation, failure=Failure("user", refusal))
            made = await self._store.add_model(self._new(tenant, session_id, number, creation))
        if made.state == "failed":
            reason = Failure.from_row(made.failure).message
            log.info("model refused", model_id=made.model_id, base_model=made.base_model, reason=reason)
        else:
            log.info("model accepted", model_id=made.model_id, base_model=made.base_model, state=made.state)
        if made.state == "accepted":
            self._binding.start(made)
        return OperationId(made.model_id, 0)

    def _new(self, tenant: str, session_id: str, number: int, creation: Creation) -> Model:
        now = self._clock()
        return Model(
            model_id=model_id_of(session_id, number),
            session_id=session_id,
            model_seq_id=number,
            tenant=tenant,
            base_model=creation.base_model,
            worker_id="",
            state="failed" if creation.failure else "accepted",
            create_kind=creation.kind,
            create_payload=creation.payload,
            lora_rank=creation.lora.rank,
            lora_alpha=creation.lora.alpha,
            train_attn=creation.lora.train_attn,
            train_mlp=creation.lora.train_mlp,
            train_unembed=creation.lora.train_unembed,
            optimizer={"type": "adamw"},
            user_metadata=creation.user_metadata,
            created_at=now,
            last_request_at=now,
            failure=creation.failure.to_row() if creation.failure else None,
        )
