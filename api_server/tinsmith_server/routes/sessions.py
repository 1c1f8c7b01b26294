"""Calls for sessions: create, heartbeat, finish, list, search, and assign to a project."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, IdempotencyKey, Limit, Offset, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.routes.http.planned_route import PlannedRoute
from tinsmith_server.services.accounts.sessions import FoundSession
from tinsmith_server.services.accounts.tokens import tenant_urn
from tinsmith_server.store.records import Session
from tinsmith_server.wire.requests import (
    CreateSessionRequest,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)
from tinsmith_server.wire.responses import (
    CreateSessionResponse,
    Empty,
    SessionResponse,
    SessionsResponse,
)
from tinsmith_server.wire.search import (
    AssignProjectRequest,
    SearchPosition,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionSummary,
)

router = APIRouter(prefix=API_PREFIX, tags=["sessions"], route_class=PlannedRoute)


@router.post("/create_session", openapi_extra=takes(CreateSessionRequest))
async def create_session(
    body: Annotated[CreateSessionRequest, Depends(body_as(CreateSessionRequest))],
    tenant: Tenant,
    services: ServicesDep,
    key: IdempotencyKey,
) -> CreateSessionResponse:
    session = await services.sessions.create(tenant, body, key)
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


@router.post("/sessions/search", openapi_extra=takes(SessionSearchRequest), response_model_exclude_none=True)
async def search_sessions(
    body: Annotated[SessionSearchRequest, Depends(body_as(SessionSearchRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> SessionSearchResponse:
    page = await services.session_search.search(tenant, body)
    behind = page.behind and SearchPosition(last_created_at=page.behind[0], last_session_id=page.behind[1])
    return SessionSearchResponse(sessions=[_summary(found) for found in page.found], next_cursor=behind)


@router.put("/sessions/{session_id}/project", openapi_extra=takes(AssignProjectRequest))
async def assign_project(
    session_id: str,
    body: Annotated[AssignProjectRequest, Depends(body_as(AssignProjectRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> Empty:
    await services.session_search.assign_project(tenant, session_id, body.project_id)
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


def _summary(found: FoundSession) -> SessionSummary:
    session = found.session
    return SessionSummary(
        session_id=session.session_id,
        created_at=session.created_at,
        owner=tenant_urn(session.tenant),
        project_id=session.project_id or "",
        status=_status(session),
        checkpoints_count=found.kept.checkpoints,
        display_name=session.display_name,
        user_metadata={key: str(value) for key, value in session.user_metadata.items()} or None,
        checkpoint_storage_bytes=found.kept.size_bytes,
    )


def _status(session: Session) -> SessionStatus:
    if session.finished_at is None:
        return SessionStatus(type="active")
    if session.finish_type == "reaped":
        return SessionStatus(type="cancelled", detail=session.finish_detail)
    reason: dict[str, str] = {"type": session.finish_type or "success"}
    return SessionStatus(type="client_finished", reason=reason, detail=session.finish_detail)
