"""Models and their operations. A call returns a future when the worker has stored the operation on disk."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from tinsmith_server.routes.http.bodies import CustomLoss, Forward, ForwardBackward, JsonObject, body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, IdempotencyKey, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import TRAINING_BODY, takes
from tinsmith_server.routes.http.planned_route import PlannedRoute
from tinsmith_server.routes.http.problems import set_user_notice
from tinsmith_server.services.training.custom_losses import CreateCustomLossRequest
from tinsmith_server.services.training.submission import Accepted
from tinsmith_server.wire.ids import OperationId
from tinsmith_server.wire.json_training import ForwardBody
from tinsmith_server.wire.requests import (
    CreateModelRequest,
    GetInfoRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)
from tinsmith_server.wire.responses import (
    FutureResponse,
    GetInfoResponse,
    ModelData,
    TokenizerResponse,
    WaitingModelsResponse,
)

router = APIRouter(prefix=API_PREFIX, tags=["training"], route_class=PlannedRoute)


def _future(operation: OperationId) -> FutureResponse:
    return FutureResponse(request_id=str(operation), model_id=operation.model_id)


def _accepted(accepted: Accepted, response: Response) -> FutureResponse:
    if accepted.notice is not None:
        set_user_notice(response, accepted.notice)
    return _future(accepted.operation)


@router.post("/create_model", openapi_extra=takes(CreateModelRequest))
async def create_model(body: JsonObject, tenant: Tenant, services: ServicesDep, key: IdempotencyKey) -> FutureResponse:
    return _future(await services.models.create(tenant, body, key))


@router.get("/waiting_models", summary="Models that wait for a worker, and what each waits for")
async def waiting_models(tenant: Tenant, services: ServicesDep) -> WaitingModelsResponse:
    """List at most 20 waiting models of the tenant, oldest first.

    Tinker's API does not have this call. The call exists for `tinsmith doctor`.
    """
    return WaitingModelsResponse(waiting_models=await services.models.waiting(tenant))


@router.post("/get_info", openapi_extra=takes(GetInfoRequest), response_model_exclude_none=True)
async def get_info(
    body: Annotated[GetInfoRequest, Depends(body_as(GetInfoRequest))], tenant: Tenant, services: ServicesDep
) -> GetInfoResponse:
    model = await services.models.owned(tenant, body.model_id)
    served = services.models.served_as(model)
    return GetInfoResponse(
        model_id=model.model_id,
        model_data=ModelData(
            arch=served.architecture if served else None, model_name=model.base_model, tokenizer_id=model.base_model
        ),
        model_name=model.base_model,
        lora_rank=model.lora_rank,
        optimizer_config=dict(model.optimizer),
    )


@router.get("/get_tokenizer", summary="Which tokenizer a model has: for programs without an SDK")
async def get_tokenizer(
    model_id: Annotated[str, Query(min_length=1)], tenant: Tenant, services: ServicesDep
) -> TokenizerResponse:
    """Return the name of the model's tokenizer. A client loads the tokenizer by this name, as the SDK does."""
    model = await services.models.owned(tenant, model_id)
    longest = services.inspection.max_sequence_length(model.base_model)
    return TokenizerResponse(
        tokenizer_id=model.base_model,
        vocab_size=services.inspection.vocab_size(model.base_model),
        model_max_length=longest,
    )


@router.post("/forward_backward", openapi_extra=TRAINING_BODY)
async def forward_backward(
    request: ForwardBackward, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.forward_backward(tenant, request, key), response)


@router.post("/forward", summary="Forward without gradients, of SDKs below 0.22.3", openapi_extra=takes(ForwardBody))
async def forward(
    request: Forward, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.forward_backward(tenant, request, key), response)


@router.post("/create_custom_loss", summary="Create a custom loss", openapi_extra=takes(CreateCustomLossRequest))
async def create_custom_loss(loss: CustomLoss, tenant: Tenant, services: ServicesDep) -> FutureResponse:
    return FutureResponse(request_id=str(await services.custom_losses.create(tenant, loss)))


@router.post("/optim_step", openapi_extra=takes(OptimStepRequest))
async def optim_step(
    body: JsonObject, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.optim_step(tenant, body, key), response)


@router.post("/save_weights", openapi_extra=takes(SaveWeightsRequest))
async def save_weights(
    body: JsonObject, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.save_weights(tenant, body, key), response)


@router.post("/save_weights_for_sampler", openapi_extra=takes(SaveWeightsForSamplerRequest))
async def save_weights_for_sampler(
    body: JsonObject, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.save_weights_for_sampler(tenant, body, key), response)


@router.post("/save_weights_external", openapi_extra=takes(SaveWeightsExternalRequest))
async def save_weights_external(
    body: JsonObject, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.save_weights_external(tenant, body, key), response)


@router.post("/load_weights", openapi_extra=takes(LoadWeightsRequest))
async def load_weights(
    body: JsonObject, tenant: Tenant, services: ServicesDep, key: IdempotencyKey, response: Response
) -> FutureResponse:
    return _accepted(await services.operations.load_weights(tenant, body, key), response)


@router.post("/unload_model", summary="End a model, of SDKs up to 0.25", openapi_extra=takes(UnloadModelRequest))
async def unload_model(
    body: Annotated[UnloadModelRequest, Depends(body_as(UnloadModelRequest))], tenant: Tenant, services: ServicesDep
) -> FutureResponse:
    return _future(await services.operations.unload(tenant, body.model_id))
