"""The first calls of every client, and calls for operators, telemetry, tokens and tokenizers."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from tinsmith_server.logs import get_logger
from tinsmith_server.routes.http.bodies import body_as, read_telemetry_body
from tinsmith_server.routes.http.dependencies import API_PREFIX, ApiKey, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.routes.http.planned_route import PlannedRoute
from tinsmith_server.routes.http.problems import problem
from tinsmith_server.wire.json_bodies import BadJson, Shape, read_object
from tinsmith_server.wire.needs import Needs, NeedsResponse
from tinsmith_server.wire.requests import ClientConfigRequest
from tinsmith_server.wire.responses import (
    CapabilitiesResponse,
    ClientConfigResponse,
    DynamicConfigResponse,
    Empty,
    HealthResponse,
    KeyDetails,
    KeyResponse,
    OrganizationName,
    TelemetryResponse,
    TokenResponse,
    UserAddress,
)

log = get_logger(__name__)

MAX_EVENTS = 100
TELEMETRY = Shape(values=16384)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,79}")

router = APIRouter(prefix=API_PREFIX, tags=["service"], route_class=PlannedRoute)


@router.get("/healthz", summary="Whether the server answers")
async def healthz() -> HealthResponse:
    return HealthResponse()


@router.get("/health", summary="The same, under another name")
async def health() -> HealthResponse:
    return HealthResponse()


@router.get("/readyz", summary="Whether this replica should be sent requests; 503 says why not")
async def readyz(services: ServicesDep) -> Response:
    reason = await services.readiness.problem()
    return problem(503, reason) if reason else JSONResponse(HealthResponse().model_dump())


@router.post("/client/config", summary="Flags for the SDK", openapi_extra=takes(ClientConfigRequest))
async def client_config(_tenant: Tenant, services: ServicesDep) -> ClientConfigResponse:
    return ClientConfigResponse(
        pjwt_auth_enabled=services.settings.token_exchange,
        proto_compress_fwdbwd=services.settings.compress_training_bodies,
        sample_use_retrieve_futures=services.settings.session_poller,
        custom_loss_server_side=services.inspection.runs_custom_losses(),
    )


@router.post("/client/dynamic_config", summary="Flags for a running SDK", openapi_extra=takes(ClientConfigRequest))
async def dynamic_config(_tenant: Tenant) -> DynamicConfigResponse:
    return DynamicConfigResponse()


@router.get("/get_server_capabilities", summary="Base models served", response_model_exclude_none=True)
async def get_server_capabilities(_tenant: Tenant, services: ServicesDep) -> CapabilitiesResponse:
    return CapabilitiesResponse(supported_models=services.capabilities.supported_models())


@router.post("/check_needs", summary="Needs that a served model does not meet", openapi_extra=takes(Needs))
async def check_needs(
    body: Annotated[Needs, Depends(body_as(Needs))], _tenant: Tenant, services: ServicesDep
) -> NeedsResponse:
    return NeedsResponse(unmet=services.capabilities.unmet(body))


@router.post("/telemetry", summary="Take the SDK's telemetry")
async def telemetry(body: Annotated[bytes, Depends(read_telemetry_body)], services: ServicesDep) -> TelemetryResponse:
    """Log the SDK's telemetry.

    The call needs no key, because each refusal would delay the user's program by half a minute.
    """
    await services.admission.off_the_loop("", len(body), lambda: note_telemetry(body))
    return TelemetryResponse()


def note_telemetry(body: bytes) -> None:
    """Log the kinds of events, and the types of errors. This function never raises, because clients must get a 2xx."""
    try:
        batch = read_object(body, TELEMETRY)
        events = batch["events"][:MAX_EVENTS]
        session_id = _word(batch.get("session_id"))
    except (BadJson, KeyError, TypeError, AttributeError):
        return
    for event in events:
        if isinstance(event, dict):
            log.debug("client event", session_id=session_id, **_safe_fields(event))


def _safe_fields(event: dict[str, Any]) -> dict[str, str]:
    names = {"kind": "event", "event_name": "event_name", "error_type": "error_type", "severity": "severity"}
    found = {shown: _word(event.get(name)) for shown, name in names.items()}
    return {shown: value for shown, value in found.items() if value is not None}


def _word(value: object) -> str | None:
    """Return the value if it looks like a name, but not like a key."""
    if not isinstance(value, str) or not _WORD.fullmatch(value) or "tml-" in value or "eyJ" in value:
        return None
    return value


ZIP: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": {}}}}


@router.get(
    "/models/{base_model:path}/tokenizer",
    summary="The tokenizer's files of a base model, as a zip archive",
    response_class=Response,
    responses=ZIP,
)
async def tokenizer(base_model: str, _tenant: Tenant, services: ServicesDep) -> Response:
    """Send a base model's tokenizer. Every key may use every base model, and may therefore get every tokenizer."""
    archive = await services.tokenizers.archive(base_model)
    return Response(archive.content, media_type="application/zip")


@router.post("/auth/token", summary="Exchange a key for a token that expires in an hour")
async def exchange(_tenant: Tenant, key: ApiKey, services: ServicesDep) -> TokenResponse:
    return TokenResponse(jwt=await services.keys.token_for(key))


@router.get("/auth/apikey/me", summary="The caller's key")
async def own_key(tenant: Tenant, key: ApiKey, services: ServicesDep) -> KeyResponse:
    caller = await services.keys.caller(key)
    return KeyResponse(
        key_id=caller.key_id,
        name=caller.name,
        note=caller.prefix,
        role=caller.role,
        details=KeyDetails(org_details=OrganizationName(name=tenant), user_details=UserAddress(email=tenant)),
    )


@router.delete("/auth/apikey/me", summary="Revoke the caller's key")
async def revoke_own_key(_tenant: Tenant, key: ApiKey, services: ServicesDep) -> Empty:
    await services.keys.revoke_own(key)
    return Empty()
