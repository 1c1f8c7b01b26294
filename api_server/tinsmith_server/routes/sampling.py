"""Sampling sessions and samples."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from tinsmith_server.routes.http.bodies import AnySample, PlainSample, body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, IdempotencyKey, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.routes.http.planned_route import PlannedRoute
from tinsmith_server.services.sampling.sample_requests import SampleSubmission
from tinsmith_server.wire.plain_requests import CreateSamplingClientRequest, PlainSampleRequest
from tinsmith_server.wire.requests import CreateSamplingSessionRequest, JoinSamplingSessionRequest, SampleRequest
from tinsmith_server.wire.responses import (
    CreateSamplingSessionResponse,
    FutureResponse,
    JoinSamplingSessionResponse,
    PlainSampleResponse,
    SamplerResponse,
    SamplingClientResponse,
)

router = APIRouter(prefix=API_PREFIX, tags=["sampling"], route_class=PlannedRoute)


@router.post("/asample", summary="Sample", openapi_extra=takes(SampleRequest))
async def asample(sample: AnySample, tenant: Tenant, services: ServicesDep, key: IdempotencyKey) -> FutureResponse:
    """Submit a sample of an SDK, or a sample without `seq_id` in the form of `/sample`."""
    if isinstance(sample, SampleSubmission):
        submission = await services.sampling.submit(tenant, sample)
    else:
        submission = await services.live_weights.submit_plain(tenant, sample, key)
    return FutureResponse(request_id=str(submission.sample), sample_sequence_ids=list(submission.sequence_ids))


@router.post("/create_sampling_session", openapi_extra=takes(CreateSamplingSessionRequest))
async def create_sampling_session(
    body: Annotated[CreateSamplingSessionRequest, Depends(body_as(CreateSamplingSessionRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> CreateSamplingSessionResponse:
    session = await services.live_weights.open(tenant, body)
    return CreateSamplingSessionResponse(sampling_session_id=session.sampling_session_id)


@router.post(
    "/join_sampling_session",
    summary="Join a sampling session as another client",
    openapi_extra=takes(JoinSamplingSessionRequest),
)
async def join_sampling_session(
    body: Annotated[JoinSamplingSessionRequest, Depends(body_as(JoinSamplingSessionRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> JoinSamplingSessionResponse:
    return JoinSamplingSessionResponse(client_counter=await services.sampling.join(tenant, body.sampling_session_id))


@router.post("/sample", summary="Sample, without an SDK", openapi_extra=takes(PlainSampleRequest))
async def sample(plain: PlainSample, tenant: Tenant, services: ServicesDep, key: IdempotencyKey) -> PlainSampleResponse:
    submission = await services.live_weights.submit_plain(tenant, plain, key)
    return PlainSampleResponse(
        request_id=str(submission.sample),
        sample_sequence_ids=list(submission.sequence_ids),
        sampling_session_id=submission.sample.sampling_session_id,
    )


@router.post(
    "/create_sampling_client",
    summary="Create a sampling client without a session",
    openapi_extra=takes(CreateSamplingClientRequest),
)
async def create_sampling_client(
    body: Annotated[CreateSamplingClientRequest, Depends(body_as(CreateSamplingClientRequest))],
    tenant: Tenant,
    services: ServicesDep,
    key: IdempotencyKey,
) -> SamplingClientResponse:
    session = await services.live_weights.open_own(tenant, body, key)
    return SamplingClientResponse(
        sampling_client_id=session.sampling_session_id,
        sampling_session_id=session.sampling_session_id,
        base_model=session.base_model,
        model_path=session.model_path,
    )


@router.get("/samplers/{sampling_session_id}", response_model_exclude_none=True)
async def get_sampler(sampling_session_id: str, tenant: Tenant, services: ServicesDep) -> SamplerResponse:
    session = await services.sampling.owned(tenant, sampling_session_id)
    return SamplerResponse(
        sampler_id=session.sampling_session_id, base_model=session.base_model, model_path=session.model_path
    )
