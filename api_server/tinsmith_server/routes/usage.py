"""Calls for a tenant's usage by hour, its stored data, its audit log, and traces of its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import date, datetime, timedelta

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from tinsmith_server.routes.http.dependencies import API_PREFIX, ServicesDep, Tenant
from tinsmith_server.services.accounts.audit import EventType
from tinsmith_server.services.usage.reports import UsageReport
from tinsmith_server.store.records import AuditEntry, Usage
from tinsmith_server.wire.responses import (
    AuditLogEntry,
    AuditLogResponse,
    CheckpointUsage,
    PrefillUsage,
    SampledUsage,
    StorageUsage,
    StoredCheckpointsItem,
    StoredCheckpointsResponse,
    TraceExportResponse,
    TrainingUsage,
    UsageEvent,
    UsageInfo,
    UsageResponse,
    UsageSession,
)

router = APIRouter(prefix=API_PREFIX, tags=["usage"])

HOUR = timedelta(hours=1)
GIGABYTE = 10**9
HOUR_SECONDS = 3600


@router.get("/billing/usage/events", response_model=UsageResponse, response_model_exclude_none=True)
async def usage_events(
    starting_on: datetime, ending_before: datetime, tenant: Tenant, services: ServicesDep
) -> Response:
    report = await services.usage.between(tenant, starting_on, ending_before)
    # The report may have thousands of rows.
    content = await asyncio.to_thread(lambda: _report(report).model_dump_json(exclude_none=True))
    return Response(content, media_type="application/json")


@router.get("/billing/usage/checkpoints/current", response_model_exclude_none=True)
async def stored_checkpoints(
    tenant: Tenant, services: ServicesDep, project_id: str | None = None
) -> StoredCheckpointsResponse:
    items = [
        StoredCheckpointsItem(
            project_id=one.project_id,
            org_user_urn=tenant,
            user_name=tenant,
            checkpoint_count=one.count,
            size_bytes=one.size_bytes,
            size_gigabytes=one.size_bytes / GIGABYTE,
        )
        for one in await services.usage.stored(tenant, project_id)
    ]
    return StoredCheckpointsResponse(data=items)


@router.get("/audit", response_model=AuditLogResponse)
async def audit_log(
    tenant: Tenant, services: ServicesDep, event_type: EventType = "all", day: date | None = None
) -> StreamingResponse:
    pages = await services.audit.of_day(tenant, event_type, day)
    return StreamingResponse(_entries(pages), media_type="application/json")


@router.get("/sessions/{session_id}/trace_export", response_model_exclude_none=True)
async def export_trace(session_id: str, request: Request, tenant: Tenant, services: ServicesDep) -> TraceExportResponse:
    base_url = services.settings.public_url or str(request.base_url)
    return TraceExportResponse(status="ready", url=await services.traces.link(tenant, session_id, base_url))


@router.get("/traces/{token}", response_class=Response, responses={200: {"content": {"application/json": {}}}})
async def trace(token: str, services: ServicesDep) -> Response:
    """Send a trace. Access needs only the link, which expires, and no key."""
    return Response(await services.traces.trace(token), media_type="application/json")


def _report(report: UsageReport) -> UsageResponse:
    projects = {session_id: facts.project_id for session_id, facts in report.sessions.items()}
    return UsageResponse(
        data=[_event(one, projects.get(one.session_id)) for one in report.usage],
        sessions={
            session_id: UsageSession(user_metadata=facts.user_metadata) for session_id, facts in report.sessions.items()
        },
    )


def _event(one: Usage, project_id: str | None) -> UsageEvent:
    return UsageEvent(
        bucket_start=one.hour,
        bucket_end=one.hour + HOUR,
        base_model=one.base_model,
        user_id=one.tenant,
        user_name=one.tenant,
        session_id=one.session_id or None,
        project_id=project_id,
        event_info=_info(one),
    )


def _info(one: Usage) -> UsageInfo:
    match one.kind:
        case "training":
            return TrainingUsage(token_count=one.amount)
        case "prefill" | "cached_prefill":
            return PrefillUsage(cached=one.kind == "cached_prefill", token_count=one.amount)
        case "sample":
            return SampledUsage(token_count=one.amount)
        case "checkpoint":
            return CheckpointUsage(count=one.amount)
        case "storage":
            return StorageUsage(gigabyte_hours=one.amount / (GIGABYTE * HOUR_SECONDS))


async def _entries(pages: AsyncIterator[Sequence[AuditEntry]]) -> AsyncIterator[bytes]:
    """Yield the JSON of an `AuditLogResponse`. Only one page is in memory at a time."""
    before = b'{"entries":['
    async for page in pages:
        yield before + b",".join(_entry(one) for one in page)
        before = b","
    yield b"]}" if before == b"," else before + b"]}"


def _entry(one: AuditEntry) -> bytes:
    of_checkpoint = {"model_id": one.model_id, "tinker_path": one.tinker_path} if one.tinker_path else {}
    log_entry = AuditLogEntry(
        timestamp=one.at,
        event=one.event,
        event_details={**one.details, **of_checkpoint},
        model_id=one.model_id or None,
        tinker_path=one.tinker_path or None,
    )
    return log_entry.model_dump_json().encode()
