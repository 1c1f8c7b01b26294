"""Prometheus metrics: requests as they pass, workers and store as they were last looked at.

Everything is labelled by base model, never by a client's ids: the page is served without a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from tinsmith_rpc import worker_pb2
from typing_extensions import override

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POLL_ROUTE = "/retrieve_future"

# A second series for each one, with the time of its first use.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One registry per app, so that two apps in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tinsmith_http_requests", "HTTP requests answered.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "tinsmith_http_request_seconds",
            "Seconds until an answer; held polls are left out.",
            ["route"],
            registry=self.registry,
        )

    def note_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        if not route.endswith(POLL_ROUTE):
            self._seconds.labels(route).observe(seconds)

    def watch(
        self,
        workers: Callable[[], Mapping[str, worker_pb2.DescribeReply]],
        rows: Callable[[], Mapping[str, int]],
        polls_held: Callable[[], int],
        names: Mapping[str, str],
    ) -> None:
        """`names` maps worker ids to the base model they are shown as."""
        self.registry.register(WorkerCollector(workers, names))
        self.registry.register(ServerCollector(rows, polls_held))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class ServerCollector(Collector):
    """Rows in the store by state, and polls that wait for a result."""

    def __init__(self, rows: Callable[[], Mapping[str, int]], polls_held: Callable[[], int]) -> None:
        self._rows = rows
        self._polls_held = polls_held

    @override
    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("tinsmith_polls_held", "Polls waiting for a result.", value=self._polls_held())
        rows = GaugeMetricFamily("tinsmith_objects", "Objects in the store.", labels=["kind", "state"])
        for name, count in self._rows().items():
            kind, _, state = name.partition(".")
            rows.add_metric([kind, state], count)
        yield rows


class WorkerCollector(Collector):
    """What `Describe` said when the workers were last looked at."""

    def __init__(self, workers: Callable[[], Mapping[str, worker_pb2.DescribeReply]], names: Mapping[str, str]) -> None:
        self._workers = workers
        self._names = names

    @override
    def collect(self) -> Iterable[Metric]:
        described = [(self._names.get(worker_id, worker_id), reply) for worker_id, reply in self._workers().items()]
        yield from _gauges(described)
        yield from _counters(described)
        yield _sync_histogram(described)


Described = Sequence[tuple[str, worker_pb2.DescribeReply]]

_GAUGES: dict[str, tuple[str, Callable[[worker_pb2.DescribeReply], float]]] = {
    "tinsmith_models_loaded": ("Models that the worker holds.", lambda reply: len(reply.models)),
    "tinsmith_queue_depth": (
        "Operations accepted and not yet run.",
        lambda reply: sum(model.queued for model in reply.models),
    ),
    "tinsmith_queue_age_seconds": (
        "Age of the oldest operation that waits.",
        lambda reply: max((model.oldest_queued_seconds for model in reply.models), default=0.0),
    ),
    "tinsmith_snapshot_age_seconds": (
        "Age of the oldest snapshot among the models.",
        lambda reply: max((model.snapshot_age_seconds for model in reply.models), default=0.0),
    ),
    "tinsmith_models_corrupted": (
        "Models that cannot go on.",
        lambda reply: sum(bool(model.corrupted) for model in reply.models),
    ),
    "tinsmith_logprob_gap": (
        "Mean absolute difference of trainer's and sampler's logprobs, latest tokens.",
        lambda reply: reply.metrics.logprob_gap,
    ),
    "tinsmith_journal_bytes": ("Size of the journal.", lambda reply: reply.metrics.journal_bytes),
}

_COUNTERS: dict[str, tuple[str, Callable[[worker_pb2.WorkerMetrics], float]]] = {
    "tinsmith_trained_tokens": ("Tokens trained on.", lambda metrics: metrics.trained_tokens),
    "tinsmith_sampled_tokens": ("Tokens sampled.", lambda metrics: metrics.sampled_tokens),
    "tinsmith_prefilled_tokens": ("Prompt tokens computed.", lambda metrics: metrics.prefilled_tokens),
    "tinsmith_prefix_hit_tokens": ("Prompt tokens taken from the cache.", lambda metrics: metrics.prefix_hit_tokens),
    "tinsmith_train_seconds": ("Seconds spent training.", lambda metrics: metrics.train_seconds),
    "tinsmith_sample_seconds": ("Seconds spent sampling.", lambda metrics: metrics.sample_seconds),
    "tinsmith_journal_operations": ("Operations journalled.", lambda metrics: metrics.journal_operations),
}

_FUTURES: dict[str, Callable[[worker_pb2.DescribeReply], float]] = {
    "queued": lambda reply: sum(model.queued for model in reply.models),
    "done": lambda reply: reply.metrics.operations_done,
    "failed": lambda reply: reply.metrics.operations_failed,
    "sampling": lambda reply: reply.metrics.samples_active,
    "waiting_to_sample": lambda reply: reply.metrics.samples_waiting,
}


def _gauges(described: Described) -> Iterable[Metric]:
    for name, (documentation, read) in _GAUGES.items():
        family = GaugeMetricFamily(name, documentation, labels=["base_model"])
        for base_model, reply in described:
            family.add_metric([base_model], read(reply))
        yield family
    futures = GaugeMetricFamily(
        "tinsmith_futures", "Futures by state, since the worker's start.", labels=["base_model", "state"]
    )
    for base_model, reply in described:
        for state, read in _FUTURES.items():
            futures.add_metric([base_model, state], read(reply))
    yield futures


def _counters(described: Described) -> Iterable[Metric]:
    for name, (documentation, read) in _COUNTERS.items():
        family = CounterMetricFamily(name, documentation, labels=["base_model"])
        for base_model, reply in described:
            family.add_metric([base_model], read(reply.metrics))
        yield family


def _sync_histogram(described: Described) -> Metric:
    family = HistogramMetricFamily(
        "tinsmith_journal_sync_seconds", "Seconds per fsync of the journal.", labels=["base_model"]
    )
    for base_model, reply in described:
        metrics = reply.metrics
        buckets = [(str(one.upper_bound_seconds), float(one.count)) for one in metrics.journal_sync_histogram]
        family.add_metric(
            [base_model], [*buckets, ("+Inf", float(metrics.journal_syncs))], sum_value=metrics.journal_sync_seconds
        )
    return family
