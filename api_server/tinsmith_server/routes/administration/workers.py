"""The call of admins for workers: what each worker and sampler has last said about itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from tinsmith_rpc import worker_pb2

from tinsmith_server.fleet.base import SamplerHandle, places_of
from tinsmith_server.routes.http.dependencies import API_PREFIX, ServicesDep, Tenant
from tinsmith_server.wire.administration import WorkerEntry, WorkersResponse

router = APIRouter(prefix=f"{API_PREFIX}/workers", tags=["administration"])

State = Literal["running", "draining", "full", "silent", "stopped"]


@router.get("", summary="All workers and samplers", response_model_exclude_none=True)
async def list_workers(_tenant: Tenant, services: ServicesDep) -> WorkersResponse:
    inspection = services.inspection
    trainers, described = inspection.trainer_ids, inspection.workers
    return WorkersResponse(
        workers=[
            _entry(handle, described.get(handle.sampler_id), trains=handle.sampler_id in trainers)
            for handle in inspection.handles
        ]
    )


def _entry(handle: SamplerHandle, reply: worker_pb2.DescribeReply | None, *, trains: bool) -> WorkerEntry:
    return WorkerEntry(
        worker_id=handle.sampler_id,
        name=handle.name,
        base_model=handle.base_model,
        kind="trainer" if trains else "sampler",
        state=_state(reply, is_connected=handle.running() is not None),
        **(_described(reply) if reply is not None else {}),
    )


def _state(reply: worker_pb2.DescribeReply | None, *, is_connected: bool) -> State:
    if not is_connected:
        return "stopped"
    if reply is None:
        return "silent"
    if reply.draining:
        return "draining"
    return "full" if reply.volume_full else "running"


def _described(reply: worker_pb2.DescribeReply) -> dict[str, Any]:
    metrics, capabilities = reply.metrics, reply.capabilities
    snapshot_at = datetime.fromtimestamp(reply.last_snapshot_time, UTC) if reply.last_snapshot_time else None
    return {
        "running_seconds": reply.running_seconds,
        "idle_seconds": reply.idle_seconds,
        "models": len(reply.models),
        "models_parked": sum(model.parked for model in reply.models),
        "model_places": places_of(reply),
        "slots": capabilities.adapter_slots,
        "queued": sum(model.queued for model in reply.models),
        "samples_active": metrics.samples_active,
        "samples_waiting": metrics.samples_waiting,
        "trained_tokens": metrics.trained_tokens,
        "sampled_tokens": metrics.sampled_tokens,
        "sampled_tokens_per_second": metrics.sampled_tokens_per_second,
        "prefilled_tokens": metrics.prefilled_tokens,
        "operations_done": metrics.operations_done,
        "operations_failed": metrics.operations_failed,
        "adapters_evicted": metrics.adapters_evicted,
        "journal_operations": metrics.journal_operations,
        "journal_bytes": metrics.journal_bytes,
        "volume_free_bytes": reply.volume_free_bytes if reply.HasField("volume_free_bytes") else None,
        "last_snapshot_at": snapshot_at,
        "engine": capabilities.engine or None,
        "numerics": capabilities.numerics or None,
        "quantization": reply.base_model.quantization or None,
        "max_rank": capabilities.max_rank or None,
    }
