"""Prometheus metrics of the workers, from the workers' last descriptions, and of the samples that workers received."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.fleet.base import places_of

LABELS = ["base_model", "worker"]
BY_KIND = ["base_model", "kind"]


@dataclass(frozen=True, slots=True)
class DescribedWorker:
    """The last description of a worker, and its name."""

    base_model: str
    name: str
    reply: worker_pb2.DescribeReply

    @property
    def labels(self) -> list[str]:
        return [self.base_model, self.name]


class WorkerCollector(Collector):
    """A collector of the workers' last descriptions."""

    def __init__(self, workers: Callable[[], Sequence[DescribedWorker]]) -> None:
        self._workers = workers

    @override
    def collect(self) -> Iterable[Metric]:
        described = self._workers()
        yield from _gauges(described)
        yield from _counters(described)
        yield from _counters_by_label(described)
        yield _sync_histogram(described)


@dataclass(frozen=True, slots=True)
class SamplingFigures:
    """Counts for metrics: samples by the kind of sampler that accepted them, further attempts, and open samplers."""

    accepted: Mapping[tuple[str, str], int]
    passed_on: Mapping[str, int]
    accepting: Mapping[tuple[str, str], int]


class SamplingCollector(Collector):
    """A collector of metrics about the routing of samples."""

    def __init__(self, figures: Callable[[], SamplingFigures]) -> None:
        self._figures = figures

    @override
    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        accepted = CounterMetricFamily("tinsmith_samples_given", "Samples that a sampler accepted.", labels=BY_KIND)
        for (base_model, kind), count in figures.accepted.items():
            accepted.add_metric([base_model, kind], count)
        yield accepted
        passed_on = CounterMetricFamily(
            "tinsmith_samples_passed_on",
            "Samples passed on to the next sampler, since the previous one was full or could not be reached.",
            labels=["base_model"],
        )
        for base_model, count in figures.passed_on.items():
            passed_on.add_metric([base_model], count)
        yield passed_on
        accepting = GaugeMetricFamily("tinsmith_samplers_accepting", "Samplers that take new samples.", labels=BY_KIND)
        for (base_model, kind), count in figures.accepting.items():
            accepting.add_metric([base_model, kind], count)
        yield accepting


_GAUGES: dict[str, tuple[str, Callable[[worker_pb2.DescribeReply], float]]] = {
    "tinsmith_models_loaded": ("Models at the worker.", lambda reply: len(reply.models)),
    "tinsmith_queue_depth": (
        "Operations accepted and not yet run.",
        lambda reply: sum(model.queued for model in reply.models),
    ),
    "tinsmith_queue_age_seconds": (
        "Age of the oldest queued operation.",
        lambda reply: max((model.oldest_queued_seconds for model in reply.models), default=0.0),
    ),
    "tinsmith_snapshot_age_seconds": (
        "Age of the oldest snapshot among the models.",
        lambda reply: max((model.snapshot_age_seconds for model in reply.models), default=0.0),
    ),
    "tinsmith_models_corrupted": (
        "Corrupted models.",
        lambda reply: sum(bool(model.corrupted) for model in reply.models),
    ),
    "tinsmith_models_quarantined": (
        "Models that wait for a restart of the worker, which could not restore them.",
        lambda reply: sum(bool(model.quarantined) for model in reply.models),
    ),
    "tinsmith_model_places": (
        "Models that the worker accepts, in memory or parked.",
        places_of,
    ),
    "tinsmith_adapters_parked": (
        "Parked adapters, which are only on the worker's volume until their models' next operations.",
        lambda reply: sum(model.parked for model in reply.models),
    ),
    "tinsmith_logprob_gap": (
        "Mean absolute difference of trainer's and sampler's logprobs, latest tokens.",
        lambda reply: reply.metrics.logprob_gap,
    ),
    "tinsmith_sample_age_seconds": (
        "Age of the oldest unfinished sample.",
        lambda reply: reply.metrics.oldest_sample_seconds,
    ),
    "tinsmith_journal_bytes": ("Size of the journal.", lambda reply: reply.metrics.journal_bytes),
}

# Samplers have no volume.
_VOLUME_GAUGES: dict[str, tuple[str, Callable[[worker_pb2.DescribeReply], float]]] = {
    "tinsmith_volume_free_bytes": (
        "Free bytes on the journal's volume.",
        lambda reply: reply.volume_free_bytes,
    ),
    "tinsmith_volume_full": (
        "1 while the worker accepts no operation, since its volume is full.",
        lambda reply: reply.volume_full,
    ),
}

_COUNTERS: dict[str, tuple[str, Callable[[worker_pb2.WorkerMetrics], float]]] = {
    "tinsmith_trained_tokens": ("Tokens trained on.", lambda metrics: metrics.trained_tokens),
    "tinsmith_sampled_tokens": ("Tokens sampled.", lambda metrics: metrics.sampled_tokens),
    "tinsmith_prefilled_tokens": ("Prompt tokens computed.", lambda metrics: metrics.prefilled_tokens),
    "tinsmith_prefix_hit_tokens": ("Prompt tokens taken from the cache.", lambda metrics: metrics.prefix_hit_tokens),
    "tinsmith_train_seconds": ("Seconds spent training.", lambda metrics: metrics.train_seconds),
    "tinsmith_sample_seconds": ("Seconds spent sampling.", lambda metrics: metrics.sample_seconds),
    "tinsmith_journal_operations": ("Operations journalled.", lambda metrics: metrics.journal_operations),
    "tinsmith_adapters_evicted": (
        "Adapters evicted from memory for others.",
        lambda metrics: metrics.adapters_evicted,
    ),
    "tinsmith_adapters_restored": (
        "Adapters loaded into memory from their snapshots.",
        lambda metrics: metrics.adapters_restored,
    ),
    "tinsmith_eviction_seconds": (
        "Seconds spent saving and dropping evicted adapters.",
        lambda metrics: metrics.eviction_seconds,
    ),
    "tinsmith_restore_seconds": (
        "Seconds spent loading evicted adapters.",
        lambda metrics: metrics.restore_seconds,
    ),
    "tinsmith_optimizer_steps": ("Optimizer steps, without those of replays.", lambda metrics: metrics.optimizer_steps),
    "tinsmith_operations_replayed": (
        "Operations that a worker computed again after its start, because no snapshot held their effect.",
        lambda metrics: metrics.operations_replayed,
    ),
    "tinsmith_operations_given_up": (
        "Operations that failed because they crashed the worker too often.",
        lambda metrics: metrics.operations_given_up,
    ),
}

_FUTURES: dict[str, Callable[[worker_pb2.DescribeReply], float]] = {
    "queued": lambda reply: sum(model.queued for model in reply.models),
    "done": lambda reply: reply.metrics.operations_done,
    "failed": lambda reply: reply.metrics.operations_failed,
    "sampling": lambda reply: reply.metrics.samples_active,
    "waiting_to_sample": lambda reply: reply.metrics.samples_waiting,
}


def _gauges(workers: Sequence[DescribedWorker]) -> Iterable[Metric]:
    with_volume = [worker for worker in workers if worker.reply.HasField("volume_free_bytes")]
    for gauges, shown in ((_GAUGES, workers), (_VOLUME_GAUGES, with_volume)):
        for name, (documentation, read) in gauges.items():
            family = GaugeMetricFamily(name, documentation, labels=LABELS)
            for worker in shown:
                family.add_metric(worker.labels, read(worker.reply))
            yield family
    futures = GaugeMetricFamily(
        "tinsmith_futures", "Futures by state, since the worker's start.", labels=[*LABELS, "state"]
    )
    for worker in workers:
        for state, read in _FUTURES.items():
            futures.add_metric([*worker.labels, state], read(worker.reply))
    yield futures


def _counters(workers: Sequence[DescribedWorker]) -> Iterable[Metric]:
    for name, (documentation, read) in _COUNTERS.items():
        family = CounterMetricFamily(name, documentation, labels=LABELS)
        for worker in workers:
            family.add_metric(worker.labels, read(worker.reply.metrics))
        yield family


_BY_LABEL: dict[str, tuple[str, str, Callable[[worker_pb2.WorkerMetrics], Mapping[str, int]]]] = {
    "tinsmith_adapters_taken": (
        "Adapters that a sampler loaded into memory, by source: `own` saves, `shared` from the worker on its device, "
        "by `stream` "
        "from a worker elsewhere, or read from the `root`.",
        "way",
        lambda metrics: metrics.adapters_taken,
    ),
    "tinsmith_save_streams_failed": (
        "Saves read from the checkpoint root because their worker did not stream them, by reason.",
        "reason",
        lambda metrics: metrics.streams_failed,
    ),
}


def _counters_by_label(workers: Sequence[DescribedWorker]) -> Iterable[Metric]:
    for name, (documentation, label, read) in _BY_LABEL.items():
        family = CounterMetricFamily(name, documentation, labels=[*LABELS, label])
        for worker in workers:
            for value, count in sorted(read(worker.reply.metrics).items()):
                family.add_metric([*worker.labels, value], count)
        yield family


def _sync_histogram(workers: Sequence[DescribedWorker]) -> Metric:
    family = HistogramMetricFamily("tinsmith_journal_sync_seconds", "Seconds per fsync of the journal.", labels=LABELS)
    for worker in workers:
        metrics = worker.reply.metrics
        buckets = [(str(one.upper_bound_seconds), float(one.count)) for one in metrics.journal_sync_histogram]
        family.add_metric(
            worker.labels, [*buckets, ("+Inf", float(metrics.journal_syncs))], sum_value=metrics.journal_sync_seconds
        )
    return family
