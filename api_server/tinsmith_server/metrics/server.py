"""Prometheus metrics of requests, workers and the store.

Labels name the base model and the worker. Labels never contain IDs of clients, because the page can be read without a
key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from tinsmith_server.metrics.workers import DescribedWorker, SamplingCollector, SamplingFigures, WorkerCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POLL_ROUTES = ("/retrieve_future", "/retrieve_futures")

# Without this, each series would get a second series with the time of its first use.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one app.

    Each app has its own registry, so that two apps in one process have separate numbers.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tinsmith_http_requests", "HTTP requests answered.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "tinsmith_http_request_seconds",
            "Seconds until an answer, without held polls.",
            ["route"],
            registry=self.registry,
        )

    def note_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        if not route.endswith(POLL_ROUTES):
            self._seconds.labels(route).observe(seconds)

    def watch(
        self,
        workers: Callable[[], Sequence[DescribedWorker]],
        rows: Callable[[], Mapping[str, int]],
        polls_held: Callable[[], int],
    ) -> None:
        self.registry.register(WorkerCollector(workers))
        self.registry.register(ServerCollector(rows, polls_held))

    def watch_sampling(self, figures: Callable[[], SamplingFigures]) -> None:
        self.registry.register(SamplingCollector(figures))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class ServerCollector(Collector):
    """The number of the store's rows in each state, and the number of held polls."""

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
