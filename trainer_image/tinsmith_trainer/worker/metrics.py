"""The description of a worker: identity, models, counters."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.engines.base import EngineCapabilities
from tinsmith_trainer.oplog.journal import SYNC_BUCKETS_SECONDS
from tinsmith_trainer.oplog.model_queue import ModelQueue
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.sample_queue import Samples
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.training.parking import Parking
from tinsmith_trainer.worker.service import WorkerService

USUAL_STEP_SECONDS = 1.0
"""The duration of a sampler's step from which on the step is reported."""


@dataclass(frozen=True, slots=True)
class WorkerName:
    """The names of a worker. A name that is unknown is empty."""

    worker_id: str = ""
    model_name: str = ""


def describe(service: WorkerService, name: WorkerName) -> worker_pb2.DescribeReply:
    now = time.time()
    engine, scheduler, queues = service.parts.engine, service.scheduler, service.queues.unreleased()
    return worker_pb2.DescribeReply(
        worker_id=name.worker_id,
        model_name=name.model_name,
        instance_id=service.instance_id,
        epoch=service.epoch,
        pid=os.getpid(),
        base_model=_base_model(engine.base_model()),
        capabilities=_capabilities(engine.capabilities(), service.parts.sampler),
        models=[_model_status(queue, scheduler.parking, now) for queue in queues],
        metrics=_metrics(service),
        running_seconds=max(scheduler.running_seconds(), _step_seconds(service.samples)),
        last_snapshot_time=scheduler.last_snapshot_time,
        snapshot_seconds=sum(queue.snapshot_seconds for queue in queues if scheduler.parking.holds(queue)),
        draining=service.is_draining,
        adapters_used=service.adapters_used,
        volume_free_bytes=service.parts.volume.room.free_bytes(),
        volume_full=not service.parts.volume.room.has_room_for(0),
        model_places=service.model_places,
        streams_saves=service.parts.offered_saves.keeps_any,
        idle_seconds=service.activity.idle_seconds(works=service.works),
    )


def _step_seconds(samples: Samples | None) -> float:
    """Return how long the sampler's current step has run, or 0 for a step of usual length."""
    seconds = 0.0 if samples is None else samples.sampler.stats().step_seconds
    return seconds if seconds >= USUAL_STEP_SECONDS else 0.0


def describe_sampler(
    instance_id: str,
    name: WorkerName,
    base: BaseModelInfo,
    capabilities: EngineCapabilities,
    samples: Samples,
    idle_seconds: float,
) -> worker_pb2.DescribeReply:
    """Describe a process that only samples.

    A sampler has no models and no epoch. The number of adapter slots is the number of versions that fit in memory.
    """
    metrics = worker_pb2.WorkerMetrics(logprob_gap=float("nan"))
    _add_sampling(metrics, samples)
    return worker_pb2.DescribeReply(
        instance_id=instance_id,
        worker_id=name.worker_id,
        model_name=name.model_name,
        pid=os.getpid(),
        base_model=_base_model(base),
        capabilities=_capabilities(capabilities, samples.sampler),
        metrics=metrics,
        running_seconds=_step_seconds(samples),
        draining=samples.is_draining,
        adapters_used=len(samples.adapters),
        streams_saves=True,
        idle_seconds=idle_seconds,
    )


def _base_model(info: BaseModelInfo) -> worker_pb2.BaseModel:
    return worker_pb2.BaseModel(
        path=info.path,
        architecture=info.architecture,
        revision=info.revision,
        vocab_size=info.vocab_size,
        max_sequence_length=info.max_sequence_length,
        quantization=info.quantization,
        stored_as=info.stored_as,
    )


def _capabilities(capabilities: EngineCapabilities, sampler: Sampler | None) -> worker_pb2.EngineCapabilities:
    return worker_pb2.EngineCapabilities(
        engine=capabilities.engine,
        losses=capabilities.losses,
        max_rank=capabilities.max_rank,
        adapter_slots=capabilities.adapter_slots,
        batch_invariant=capabilities.batch_invariant,
        numerics=capabilities.numerics or "",
        train_unembed=capabilities.train_unembed,
        train_mlp=capabilities.train_mlp,
        train_attn=capabilities.train_attn,
        images=capabilities.images,
        sampling="" if sampler is None else sampler.sequence_memory(),
    )


def _model_status(queue: ModelQueue, parking: Parking, now: float) -> worker_pb2.ModelStatus:
    oldest = queue.oldest_waiting_at()
    parked = parking.is_parked(queue)
    return worker_pb2.ModelStatus(
        model_id=queue.model_id,
        rank=queue.rank,
        last_applied_seq_id=queue.order.applied,
        optimizer_step=queue.optimizer_step,
        queued=queue.order.waiting_count,
        oldest_queued_seconds=0.0 if oldest is None else now - oldest,
        snapshot_age_seconds=now - queue.snapshot_at if queue.snapshot_at and not parked else 0.0,
        corrupted=queue.reason if queue.phase == "corrupted" else "",
        quarantined=queue.quarantined or (queue.held_because if queue.damage_seen_by else ""),
        parked=parked,
    )


def _metrics(service: WorkerService) -> worker_pb2.WorkerMetrics:
    counters, journal = service.scheduler.counters, service.journal.stats
    parking = service.scheduler.parking.figures
    metrics = worker_pb2.WorkerMetrics(
        trained_tokens=counters.trained_tokens,
        train_seconds=counters.train_seconds,
        operations_done=counters.operations_done,
        operations_failed=counters.operations_failed,
        operations_given_up=counters.operations_given_up,
        operations_replayed=counters.operations_replayed,
        optimizer_steps=counters.optimizer_steps,
        adapters_evicted=parking.evicted,
        eviction_seconds=parking.eviction_seconds,
        adapters_restored=parking.restored,
        restore_seconds=parking.restore_seconds,
        journal_syncs=journal.commits,
        journal_sync_seconds=journal.sync_seconds,
        journal_operations=journal.operations,
        journal_bytes=service.journal.size_bytes(),
        logprob_gap=service.scheduler.training_calls.logprob_gap.value,
        journal_sync_histogram=[
            worker_pb2.HistogramBucket(upper_bound_seconds=bound, count=count)
            for bound, count in zip(SYNC_BUCKETS_SECONDS, journal.histogram, strict=True)
        ],
    )
    if service.samples is not None:
        _add_sampling(metrics, service.samples)
    return metrics


def _add_sampling(metrics: worker_pb2.WorkerMetrics, samples: Samples) -> None:
    stats = samples.sampler.stats()
    metrics.sampled_tokens = stats.sampled_tokens
    metrics.prefilled_tokens = stats.prefilled_tokens
    metrics.prefix_hit_tokens = stats.prefix_hit_tokens
    metrics.sample_seconds = stats.busy_seconds
    metrics.samples_active = stats.active
    # The sampler does not know samples that wait for their adapter.
    metrics.samples_waiting = max(stats.waiting, samples.unfinished - stats.active)
    metrics.oldest_sample_seconds = samples.load.oldest_seconds()
    metrics.sampled_tokens_per_second = samples.load.tokens_per_second(stats.sampled_tokens)
    metrics.adapters_taken.update(samples.adapters.sources.taken())
    metrics.streams_failed.update(samples.adapters.sources.streams_failed())
