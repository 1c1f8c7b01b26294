"""The new model that a creation request describes. A failure is returned as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError
from tinsmith_rpc import worker_pb2

from tinsmith_server.fleet.base import Fleet, ServedModel
from tinsmith_server.fleet.names import NotServed, served_model, share_weights
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.services.failures import Failure, sampling_only
from tinsmith_server.services.training.needs import NeedsUnmet, check_needs
from tinsmith_server.store.records import Checkpoint
from tinsmith_server.wire.json_bodies import sentence
from tinsmith_server.wire.requests import CreateModelRequest, LoadWeightsRequest, OptimizerConfig
from tinsmith_server.wire.responses import SupportedModel

OPTIMIZERS = ("adamw",)
# Optimizers that SDKs know by name.
WHY_NOT = {
    "dimuon": "the vendor says of its update how large it is and that it takes a preconditioner and a matrix sign, but "
    "neither which nor their constants, and another update would train otherwise under the same name"
}


@dataclass(frozen=True, slots=True)
class Creation:
    """The row of a new model. If `failure` is set, the row contains the reason why the model does not exist."""

    kind: Literal["create", "load"]
    base_model: str
    payload: bytes = b""
    lora: worker_pb2.LoraConfig = field(default_factory=worker_pb2.LoraConfig)
    user_metadata: Mapping[str, str] | None = None
    failure: Failure | None = None


class InvalidModelRequest(Exception):
    """The request is invalid; the message is for the user."""


def creation_from_scratch(
    body: dict[str, Any], fleet: Fleet, alpha: float, describe: Callable[[ServedModel], SupportedModel]
) -> Creation:
    """Return the creation. `describe` returns the capabilities of a model, with which needs are compared."""
    base_model = _text(body.get("base_model"))
    try:
        request = CreateModelRequest.model_validate(body)
        served = find_served(fleet, request.base_model)
        check_rank(served, request.lora_config.rank)
        check_optimizer(request.optimizer_config)
        check_needs(request, describe(served))
    except ValidationError as error:
        return Creation("create", base_model, failure=Failure("user", sentence(error)))
    except (InvalidModelRequest, NeedsUnmet) as error:
        return Creation("create", base_model, failure=Failure("user", str(error)))
    lora = worker_pb2.LoraConfig(alpha=alpha, **request.lora_config.model_dump(exclude_none=True))
    payload = worker_pb2.CreateModel(lora=lora).SerializeToString()
    return Creation("create", served.name, payload, lora, request.user_metadata)


async def creation_by_load(tenant: str, body: dict[str, Any], fleet: Fleet, lookup: CheckpointLookup) -> Creation:
    base_model = _text(body.get("base_model"))
    try:
        request = LoadWeightsRequest.model_validate(body)
        check_optimizer(request.optimizer_config)
        checkpoint = await lookup.readable(tenant, request.path, "training", request.weights_access_token)
        base_model = base_model or checkpoint.base_model
        served = _compatible(fleet, checkpoint, request.base_model)
        check_rank(served, checkpoint.lora_rank)
    except ValidationError as error:
        return Creation("load", base_model, failure=Failure("user", sentence(error)))
    except (InvalidModelRequest, CheckpointRefused) as error:
        return Creation("load", base_model, failure=Failure("user", str(error)))
    payload = load_payload(checkpoint, request, create=True).SerializeToString()
    lora = worker_pb2.LoraConfig(
        rank=checkpoint.lora_rank,
        alpha=checkpoint.lora_alpha,
        train_attn=checkpoint.train_attn,
        train_mlp=checkpoint.train_mlp,
        train_unembed=checkpoint.train_unembed,
    )
    return Creation("load", served.name, payload, lora, request.user_metadata)


def load_payload(checkpoint: Checkpoint, request: LoadWeightsRequest, *, create: bool) -> worker_pb2.LoadWeights:
    return worker_pb2.LoadWeights(
        tinker_path=request.path,
        directory=checkpoint.directory,
        manifest_digest=checkpoint.manifest_digest,
        with_optimizer=request.optimizer,
        create=create,
    )


def find_served(fleet: Fleet, name: str) -> ServedModel:
    """Return the served model of this name. Raises InvalidModelRequest with the names of the served models."""
    try:
        served = served_model(fleet, name)
    except NotServed as error:
        raise InvalidModelRequest(str(error)) from error
    if not served.training:
        raise InvalidModelRequest(sampling_only(name))
    return served


def check_rank(served: ServedModel, rank: int) -> None:
    if served.max_rank is not None and rank > served.max_rank:
        raise InvalidModelRequest(
            f"lora_config.rank: {rank} is above {served.max_rank}, the limit of {served.name}; use a lower rank, or "
            "ask an administrator to raise adapters.maxRank of its TrainingSession"
        )


def check_optimizer(config: OptimizerConfig) -> None:
    if config.type not in OPTIMIZERS:
        reason = f": {WHY_NOT[config.type]}" if config.type in WHY_NOT else ""
        known = ", ".join(OPTIMIZERS)
        raise InvalidModelRequest(f"the optimizer {config.type!r} is not supported{reason}; use {known}")


def _compatible(fleet: Fleet, checkpoint: Checkpoint, base_model: str | None) -> ServedModel:
    """Return the base model for a load: the checkpoint's base model, or another name for the same weights."""
    served = find_served(fleet, base_model or checkpoint.base_model)
    if not share_weights(fleet, served.name, checkpoint.base_model):
        raise InvalidModelRequest(
            f"the checkpoint is of {checkpoint.base_model}; it cannot be loaded onto {base_model}"
        )
    return served


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
