"""Training runs: lists, and the series of a run, in parts or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Response

from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import get_logger
from tinsmith_server.routes.checkpoints import checkpoint_response
from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, ApiKey, Limit, Offset, ServicesDep, Tenant
from tinsmith_server.routes.http.event_stream import EventStream
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.services.accounts.callers import Caller
from tinsmith_server.services.runs.runs import TrainingRun
from tinsmith_server.services.runs.series import SeriesPart
from tinsmith_server.store.run_series import RECENT_LOSSES, recent_losses
from tinsmith_server.wire.requests import RunMetricsRequest
from tinsmith_server.wire.responses import (
    Cursor,
    Empty,
    RunMetricsResponse,
    RunProgressResponse,
    RunReportResponse,
    RunStepResponse,
    TrainingRunResponse,
    TrainingRunsResponse,
)

log = get_logger(__name__)

router = APIRouter(prefix=API_PREFIX, tags=["runs"])

T = TypeVar("T")

Losses = Annotated[int, Query(ge=0, le=RECENT_LOSSES, description="Add this many of the newest losses to each run.")]
After = Annotated[int, Query(ge=0, lt=2**62, description="The cursor of the same name in the previous answer.")]
Points = Annotated[int, Query(ge=1, le=10_000)]
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
# A comment, by which clients and proxies see that the stream is alive.
ALIVE = b": alive\n\n"


@router.get("/training_runs", summary="Runs, newest first, with their progress", response_model_exclude_none=True)
async def list_training_runs(
    tenant: Tenant,
    services: ServicesDep,
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: str | None = None,
    losses: Losses = 0,
) -> TrainingRunsResponse:
    page = await services.runs.page(tenant, limit, offset, project_id)
    return TrainingRunsResponse(
        training_runs=[_run(run, losses) for run in page.rows],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total),
    )


@router.get(
    "/training_runs/live",
    summary="An event whenever a list of the runs may look different",
    response_class=Response,
    responses=EVENTS,
)
async def live_training_runs(tenant: Tenant, services: ServicesDep, key: ApiKey) -> Response:
    changes = services.run_series.live_list(tenant)
    return await _stream(changes, lambda has_changed: "{}" if has_changed else None, partial(services.keys.caller, key))


@router.get("/training_runs/{run_id}", summary="A run and its progress", response_model_exclude_none=True)
async def get_training_run(
    run_id: str, tenant: Tenant, services: ServicesDep, losses: Losses = 0
) -> TrainingRunResponse:
    return _run(await services.runs.run(tenant, run_id), losses)


@router.get(
    "/training_runs/{run_id}/metrics",
    summary="Steps and reported metrics of a run, after a cursor",
    response_model=RunMetricsResponse,
)
async def run_metrics(
    run_id: str,
    tenant: Tenant,
    services: ServicesDep,
    after: After = 0,
    after_reported: After = 0,
    limit: Points = 1000,
) -> Response:
    part = await services.run_series.part(tenant, run_id, after, after_reported, limit)
    # Ten thousand points would block the event loop for a second.
    return Response(await asyncio.to_thread(_part_json, part), media_type="application/json")


@router.post(
    "/training_runs/{run_id}/metrics",
    summary="Report metrics that the program computes, such as rewards",
    openapi_extra=takes(RunMetricsRequest),
)
async def report_metrics(
    run_id: str,
    body: Annotated[RunMetricsRequest, Depends(body_as(RunMetricsRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> Empty:
    await services.run_series.report(tenant, run_id, body)
    return Empty()


@router.get(
    "/training_runs/{run_id}/metrics/live",
    summary="The series of a run as it grows",
    response_class=Response,
    responses=EVENTS,
)
async def live_metrics(
    run_id: str,
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
    after: After = 0,
    after_reported: After = 0,
) -> Response:
    """Send each new part of the series as an event, in the form of the call without `/live`.

    The stream ends after a quarter of an hour, or when the server stops. Open it again with the cursors of the last
    event.
    """
    parts = services.run_series.live(tenant, run_id, after, after_reported)
    check_key = partial(services.keys.caller, key)
    return await _stream(parts, lambda part: _part_json(part) if part else None, check_key)


async def _stream(
    news: AsyncGenerator[T, None], data_of: Callable[[T], str | None], check_key: Callable[[], Awaitable[Caller]]
) -> EventStream:
    """Return a stream with an event for each item that has data. Raises the error of the first item.

    The stream ends at the first item after the end of the key, or of the session of the console. It also ends at a
    later error: its client opens another stream, and gets the error of that request.
    """
    first = await anext(news)

    async def events() -> AsyncIterator[bytes]:
        yield _event(data_of(first))
        try:
            async for item in news:
                await check_key()
                yield _event(data_of(item))
        except TinsmithError as error:
            log.info("live stream ended", reason=str(error))

    return EventStream(events(), news.aclose)


def _event(data: str | None) -> bytes:
    return ALIVE if data is None else f"data: {data}\n\n".encode()


def _run(run: TrainingRun, losses: int) -> TrainingRunResponse:
    model = run.model
    return TrainingRunResponse(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=model.tenant,
        lora_rank=model.lora_rank,
        corrupted=model.state == "corrupted",
        last_request_time=run.last_request_at,
        last_checkpoint=checkpoint_response(run.last_checkpoint) if run.last_checkpoint else None,
        last_sampler_checkpoint=(
            checkpoint_response(run.last_sampler_checkpoint) if run.last_sampler_checkpoint else None
        ),
        user_metadata=dict(model.user_metadata) if model.user_metadata is not None else None,
        created_at=model.created_at,
        session_id=model.session_id,
        display_name=run.display_name,
        state=run.state,
        failure=run.failure,
        waiting_reason=run.wait.reason if run.wait else None,
        queue_position=run.wait.number if run.wait else None,
        queued_operations=run.status.queued if run.status else None,
        progress=_progress(run),
        losses=recent_losses(run.progress, losses) if run.progress and losses else None,
    )


def _progress(run: TrainingRun) -> RunProgressResponse | None:
    progress = run.progress
    if progress is None or progress.at is None:
        return None
    return RunProgressResponse(
        step=progress.step,
        last_step_at=progress.at,
        loss=progress.loss,
        tokens_per_second=progress.tokens_per_second,
        total_steps=run.total_steps,
        eta_seconds=run.eta_seconds,
    )


def _part_json(part: SeriesPart) -> str:
    """Return the JSON of a RunMetricsResponse."""
    response = RunMetricsResponse(
        steps=[
            RunStepResponse(
                position=one.position,
                step=one.step,
                time=one.at,
                steps=one.steps,
                tokens=one.tokens,
                loss=one.loss,
                grad_norm=one.grad_norm,
                learning_rate=one.learning_rate,
                seconds=one.seconds,
                sampler_gap=one.sampler_gap,
            )
            for one in part.steps
        ],
        reported=[
            RunReportResponse(revision=one.revision, step=one.step, time=one.at, values=dict(one.values))
            for one in part.reports
        ],
        after=part.after,
        after_reported=part.after_reported,
        more=part.more,
    )
    return response.model_dump_json(exclude_none=True)
