"""The conversion of JSON bodies to the worker's requests. An invalid body becomes a rejection.

A `forward_backward` in protobuf is not decoded here. A `forward_backward` in JSON, from an SDK below 0.22.3, is
converted to the message of the current SDK.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import Message
from pydantic import ValidationError
from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import Unprocessable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.fleet.names import share_weights
from tinsmith_server.services.accounts.quotas import CheckpointQuota
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.services.checkpoints.worker_events import CHECKPOINT_TYPES, Events
from tinsmith_server.services.failures import rejection, training_only
from tinsmith_server.services.training.model_creation import load_payload
from tinsmith_server.store.records import Model
from tinsmith_server.wire.ids import sampling_session_id_of
from tinsmith_server.wire.json_bodies import sentence
from tinsmith_server.wire.json_training import InvalidTraining, json_head, training_message
from tinsmith_server.wire.requests import (
    AdamParams,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

WHICH_OPERATION = (
    "model_id is needed, and seq_id must be a positive number; without seq_id, the operation runs after all operations "
    "that the server has accepted"
)

CallKey = Literal["forward_backward_input", "forward_input"]
"""The field of a JSON body that contains the data."""


@dataclass(frozen=True, slots=True)
class JsonOperation:
    """An operation without its epoch, from a JSON body."""

    request: worker_pb2.SubmitRequest
    loss_fn: str | None


def json_operation(content: dict[str, Any], key: CallKey, limit_bytes: int) -> JsonOperation:
    """Return the operation. Raises Unprocessable if the body does not identify an operation."""
    head = json_head(content, key)
    if head is None:
        raise Unprocessable(WHICH_OPERATION)
    request = worker_pb2.SubmitRequest(model_id=head.model_id, seq_id=head.seq_id, kind=worker_pb2.FORWARD_BACKWARD)
    try:
        request.payload = _payload(content.get(key), key, limit_bytes)
    except InvalidTraining as error:
        request.rejection.CopyFrom(rejection(str(error)))
    return JsonOperation(request, head.loss_fn)


def _payload(call: object, key: CallKey, limit_bytes: int) -> bytes:
    """Return the payload of the call. Raises InvalidTraining."""
    message = training_message(call, forward_only=key == "forward_input")
    if (size := message.ByteSize()) > limit_bytes:
        raise InvalidTraining(
            f"the data have {size} bytes, over the limit of {limit_bytes} (setting max_body_bytes); send fewer datums "
            "in a call"
        )
    return message.SerializeToString()


class SubmitRequests:
    """A builder of requests to the worker. The request for a load contains the location of the checkpoint's files."""

    def __init__(self, fleet: Fleet, events: Events, lookup: CheckpointLookup, checkpoints: CheckpointQuota) -> None:
        self._fleet = fleet
        self._events = events
        self._lookup = lookup
        self._checkpoints = checkpoints

    def optim_step(self, model: Model, seq_id: int, body: dict[str, Any]) -> worker_pb2.SubmitRequest:
        try:
            request = OptimStepRequest.model_validate(body)
        except ValidationError as error:
            return _rejected(model, seq_id, worker_pb2.OPTIM_STEP, sentence(error))
        if request.optimizer_params is not None:
            kind = request.optimizer_params.get("type")
            return _rejected(
                model, seq_id, worker_pb2.OPTIM_STEP, f"the optimizer {kind!r} is not supported; send adam_params"
            )
        params = request.adam_params or AdamParams()
        return _request(model, seq_id, worker_pb2.OPTIM_STEP, worker_pb2.OptimStep(**params.model_dump()))

    async def save_weights(self, model: Model, seq_id: int, body: dict[str, Any]) -> worker_pb2.SubmitRequest:
        try:
            request = SaveWeightsRequest.model_validate(body)
        except ValidationError as error:
            return _rejected(model, seq_id, worker_pb2.SAVE_WEIGHTS, sentence(error))
        save = worker_pb2.SaveWeights(
            kind=worker_pb2.TRAINING,
            name=request.path,
            overwrite=request.overwrite,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            has_user_metadata=request.user_metadata is not None,
        )
        return await self._named(model, seq_id, save)

    async def save_weights_for_sampler(
        self, model: Model, seq_id: int, body: dict[str, Any]
    ) -> worker_pb2.SubmitRequest:
        try:
            request = SaveWeightsForSamplerRequest.model_validate(body)
        except ValidationError as error:
            return _rejected(model, seq_id, worker_pb2.SAVE_WEIGHTS, sentence(error))
        save = worker_pb2.SaveWeights(
            kind=worker_pb2.SAMPLER,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            has_user_metadata=request.user_metadata is not None,
        )
        if request.path is not None:
            save.name = request.path
            return await self._named(model, seq_id, save)
        assert request.sampling_session_seq_id is not None  # checked by the request's validator
        name = sampling_session_id_of(
            model.session_id, request.sampling_session_seq_id, inflight=request.kind == "inflight"
        )
        return self._unnamed(model, seq_id, save, name)

    def save_live(self, model: Model, sampling_session_id: str) -> worker_pb2.SubmitRequest:
        """Return the request for a save without a name, which opens the sampling session."""
        return self._unnamed(model, 0, worker_pb2.SaveWeights(), sampling_session_id)

    def _unnamed(
        self, model: Model, seq_id: int, save: worker_pb2.SaveWeights, sampling_session_id: str
    ) -> worker_pb2.SubmitRequest:
        served = self._fleet.model(model.base_model)
        if served is not None and not served.sampling:
            # An unnamed save can only be sampled.
            return _rejected(model, seq_id, worker_pb2.SAVE_WEIGHTS, training_only(model.base_model))
        save.kind, save.sampling_session_id = worker_pb2.EPHEMERAL, sampling_session_id
        return _request(model, seq_id, worker_pb2.SAVE_WEIGHTS, save)

    async def save_weights_external(self, model: Model, seq_id: int, body: dict[str, Any]) -> worker_pb2.SubmitRequest:
        try:
            request = SaveWeightsExternalRequest.model_validate(body)
        except ValidationError as error:
            return _rejected(model, seq_id, worker_pb2.SAVE_WEIGHTS, sentence(error))
        save = worker_pb2.SaveWeights(
            kind=worker_pb2.EXTERNAL,
            name=request.path,
            ttl_seconds=request.ttl_seconds,
            age_recipients=request.age_encryption_recipients,
        )
        return await self._named(model, seq_id, save)

    async def load_weights(self, model: Model, seq_id: int, body: dict[str, Any]) -> worker_pb2.SubmitRequest:
        try:
            request = LoadWeightsRequest.model_validate(body)
            checkpoint = await self._lookup.readable(
                model.tenant, request.path, "training", request.weights_access_token
            )
        except ValidationError as error:
            return _rejected(model, seq_id, worker_pb2.LOAD_WEIGHTS, sentence(error))
        except CheckpointRefused as error:
            return _rejected(model, seq_id, worker_pb2.LOAD_WEIGHTS, str(error))
        if not share_weights(self._fleet, checkpoint.base_model, model.base_model):
            return _rejected(
                model,
                seq_id,
                worker_pb2.LOAD_WEIGHTS,
                f"{request.path} is of the base model {checkpoint.base_model}, not of {model.base_model}",
            )
        load = load_payload(checkpoint, request, create=False)
        return _request(model, seq_id, worker_pb2.LOAD_WEIGHTS, load)

    async def completed(
        self, model: Model, request: worker_pb2.SubmitRequest, connect_seconds: float
    ) -> worker_pb2.SubmitRequest:
        """Return the request as the worker needs it now. A named save says whether its name is taken.

        The store knows the names of the saves whose events it has applied. The worker itself knows the saves that are
        still in its queue. Raises WorkerUnavailable after `connect_seconds`.
        """
        if request.kind != worker_pb2.SAVE_WEIGHTS or not request.payload:
            return request
        save = worker_pb2.SaveWeights.FromString(request.payload)
        type = CHECKPOINT_TYPES[save.kind]
        if type == "ephemeral":
            return request
        save.seen_event_id = await self._events.drain(model.worker_id, connect_seconds)
        save.name_taken = await self._lookup.live(model.model_id, type, save.name) is not None
        completed = worker_pb2.SubmitRequest()
        completed.CopyFrom(request)
        completed.payload = save.SerializeToString()
        return completed

    async def _named(self, model: Model, seq_id: int, save: worker_pb2.SaveWeights) -> worker_pb2.SubmitRequest:
        """Return a request for a save, or a rejection if the tenant's checkpoints use all of their space."""
        if (refusal := await self._checkpoints.refusal(model.tenant)) is not None:
            return _rejected(model, seq_id, worker_pb2.SAVE_WEIGHTS, refusal)
        return _request(model, seq_id, worker_pb2.SAVE_WEIGHTS, save)


def _request(
    model: Model, seq_id: int, kind: worker_pb2.OperationKind.ValueType, payload: Message
) -> worker_pb2.SubmitRequest:
    return worker_pb2.SubmitRequest(
        model_id=model.model_id, seq_id=seq_id, kind=kind, payload=payload.SerializeToString()
    )


def _rejected(
    model: Model, seq_id: int, kind: worker_pb2.OperationKind.ValueType, message: str
) -> worker_pb2.SubmitRequest:
    """Return a rejected operation, which keeps its number and fails in the order of the model's operations."""
    return worker_pb2.SubmitRequest(model_id=model.model_id, seq_id=seq_id, kind=kind, rejection=rejection(message))
