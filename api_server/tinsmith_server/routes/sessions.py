"""Sessions: create, heartbeat, finish, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header

from tinsmith_server.routes.bodies import body_as
from tinsmith_server.routes.dependencies import Limit, Offset, ServicesDep, Tenant
from tinsmith_server.routes.direct import DirectRoute
from tinsmith_server.routes.openapi import takes
from tinsmith_server.wire.requests import CreateSessionRequest, FinishSessionRequest, SessionHeartbeatRequest
from tinsmith_server.wire.responses import CreateSessionResponse, Empty, SessionResponse, SessionsResponse

router = APIRouter(tags=["sessions"], route_class=DirectRoute)


@router.post("/create_session", openapi_extra=takes(CreateSessionRequest))
async def create_session(
    body: Annotated[CreateSessionRequest, Depends(body_as(CreateSessionRequest))],
    tenant: Tenant,
    services: ServicesDep,
    x_idempotency_key: Annotated[str | None, Header()] = None,
) -> CreateSessionResponse:
    session = await services.sessions.create(tenant, body, x_idempotency_key)
    return CreateSessionResponse(session_id=session.session_id)


@router.post("/session_heartbeat", openapi_extra=takes(SessionHeartbeatRequest))
async def session_heartbeat(
    body: Annotated[SessionHeartbeatRequest, Depends(body_as(SessionHeartbeatRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> Empty:
    await services.sessions.heartbeat(tenant, body.session_id)
    return Empty()


@router.post("/sessions/{session_id}/finish", openapi_extra=takes(FinishSessionRequest))
async def finish_session(
    session_id: str,
    body: Annotated[FinishSessionRequest, Depends(body_as(FinishSessionRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> Empty:
    await services.sessions.finish(tenant, session_id, body)
    return Empty()


@router.get("/sessions")
async def list_sessions(
    tenant: Tenant,
    services: ServicesDep,
    limit: Limit = 20,
    offset: Offset = 0,
) -> SessionsResponse:
    return SessionsResponse(sessions=await services.sessions.list_ids(tenant, limit, offset))


@router.get("/sessions/{session_id}", response_model_exclude_none=True)
async def get_session(session_id: str, tenant: Tenant, services: ServicesDep) -> SessionResponse:
    session = await services.sessions.owned(tenant, session_id)
    models, samplers = await services.sessions.contents(session_id)
    return SessionResponse(
        training_run_ids=list(models),
        sampler_ids=list(samplers),
        user_metadata=dict(session.user_metadata),
        display_name=session.display_name,
    )
