"""What every client asks first, and what operators ask: flags, health, capabilities, telemetry, metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from tinsmith_server.routes.bodies import read_telemetry_body
from tinsmith_server.routes.dependencies import ServicesDep, Tenant
from tinsmith_server.routes.documentation import takes
from tinsmith_server.routes.problems import problem
from tinsmith_server.services.telemetry import note_telemetry
from tinsmith_server.wire.requests import ClientConfigRequest
from tinsmith_server.wire.responses import (
    CapabilitiesResponse,
    ClientConfigResponse,
    DynamicConfigResponse,
    HealthResponse,
    TelemetryResponse,
)

router = APIRouter(tags=["service"])


@router.get("/healthz", summary="Whether the server answers")
async def healthz() -> HealthResponse:
    return HealthResponse()


@router.get(
    "/readyz",
    summary="Whether this replica should be sent requests",
    responses={503: {"description": "Not now; `detail` says why."}},
)
async def readyz(services: ServicesDep) -> Response:
    reason = await services.readiness.problem()
    return problem(503, reason) if reason else JSONResponse(HealthResponse().model_dump())


@router.post("/client/config", summary="Flags for the SDK", openapi_extra=takes(ClientConfigRequest))
async def client_config(_tenant: Tenant, services: ServicesDep) -> ClientConfigResponse:
    return ClientConfigResponse(proto_compress_fwdbwd=services.settings.compress_training_bodies)


@router.post("/client/dynamic_config", summary="Flags for a running SDK", openapi_extra=takes(ClientConfigRequest))
async def dynamic_config(_tenant: Tenant) -> DynamicConfigResponse:
    return DynamicConfigResponse()


@router.get("/get_server_capabilities", summary="Base models served", response_model_exclude_none=True)
async def get_server_capabilities(_tenant: Tenant, services: ServicesDep) -> CapabilitiesResponse:
    return CapabilitiesResponse(supported_models=services.capabilities.supported_models())


@router.post("/telemetry", summary="Take the SDK's telemetry")
async def telemetry(body: Annotated[bytes, Depends(read_telemetry_body)]) -> TelemetryResponse:
    """Without a key, too: each refusal would cost the user half a minute."""
    note_telemetry(body)
    return TelemetryResponse()
