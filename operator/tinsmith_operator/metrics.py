"""Prometheus metrics of the operator, and of the latest observed state of sessions and pools."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from tinsmith_operator.api.base import Manifest, parse_quantity, parse_time
from tinsmith_operator.api.names import POOL_KIND
from tinsmith_operator.api.owner import effective_spec
from tinsmith_operator.api.serving_spec import GPU
from tinsmith_operator.kube.resources import ApiCall

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "tinsmith_operator"

# Off, because creation timestamps would add a second series for each counter.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one operator.

    Each operator has a registry, so two operators in one process have separate metrics.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(f"{PREFIX}_reconciles", "Reconciles, by result.", ["result"], registry=self.registry)
        self._seconds = Histogram(
            f"{PREFIX}_reconcile_seconds", "Duration of reconciles in seconds.", registry=self.registry
        )
        self._retries = Counter(
            f"{PREFIX}_retries", "Sessions and pools requeued after a failure.", registry=self.registry
        )
        self._requests = Counter(
            f"{PREFIX}_api_requests",
            "Requests to the Kubernetes API.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )

    def note_reconcile(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def note_retry(self) -> None:
        self._retries.inc()

    def note_request(self, call: ApiCall, code: str) -> None:
        self._requests.labels(call.verb, call.resource, code).inc()

    def watch(
        self,
        queue_depth: Callable[[], int],
        is_leading: Callable[[], bool],
        owners: Callable[[], Iterable[Manifest]],
        certificates: Callable[[], Iterable[tuple[str, str, datetime]]],
        are_kept: Callable[[], bool],
        forbidden: Callable[[], int],
        *,
        unknown_kinds: Callable[[], int],
        clock_offset_seconds: Callable[[], float],
    ) -> None:
        """Register the values that are read at each scrape.

        - `certificates`: the namespace, Secret and expiry of each certificate.
        - `are_kept`: whether the operator can issue certificates.
        - `forbidden`: the number of namespaces that the operator may not list.
        - `unknown_kinds`: the number of missing CRDs.
        - `clock_offset_seconds`: how many seconds the API server's clock is ahead.
        """
        self.registry.register(
            StateCollector(
                queue_depth,
                is_leading,
                owners,
                certificates,
                are_kept,
                forbidden,
                unknown_kinds=unknown_kinds,
                clock_offset_seconds=clock_offset_seconds,
            )
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)


class StateCollector(Collector):
    """The values that are read at each scrape."""

    def __init__(
        self,
        queue_depth: Callable[[], int],
        is_leading: Callable[[], bool],
        owners: Callable[[], Iterable[Manifest]],
        certificates: Callable[[], Iterable[tuple[str, str, datetime]]],
        are_kept: Callable[[], bool],
        forbidden: Callable[[], int],
        *,
        unknown_kinds: Callable[[], int],
        clock_offset_seconds: Callable[[], float],
    ) -> None:
        self._queue_depth = queue_depth
        self._is_leading = is_leading
        self._owners = owners
        self._certificates = certificates
        self._are_kept = are_kept
        self._forbidden = forbidden
        self._unknown_kinds = unknown_kinds
        self._clock_offset_seconds = clock_offset_seconds

    @override
    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | Metric]:
        yield GaugeMetricFamily(
            f"{PREFIX}_queue_depth", "Sessions and pools that wait to be reconciled.", value=self._queue_depth()
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_leader", "1 on the leader, 0 on standby operators.", value=float(self._is_leading())
        )
        yield self._conditions()
        yield self._replicas()
        yield self._idle_gpu_seconds()
        yield self._certificate_ends()
        yield GaugeMetricFamily(
            f"{PREFIX}_certificates_kept",
            "0 on the leader while certificates cannot be issued or stored; "
            "the conditions of sessions and pools say why.",
            value=float(self._are_kept()),
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_namespaces_forbidden",
            "Namespaces in the operator's scope that it may not list; `/readyz` names them.",
            value=self._forbidden(),
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_kinds_unknown",
            "CRDs of the operator that are not installed; `/readyz` names them. The other kind is served.",
            value=self._unknown_kinds(),
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_clock_offset_seconds",
            "Seconds by which the API server's clock is provably ahead of the operator's.",
            value=self._clock_offset_seconds(),
        )

    def _conditions(self) -> Metric:
        tally = Tally(
            (owner["kind"], owner["metadata"]["namespace"], condition["type"], condition["status"], condition["reason"])
            for owner in self._owners()
            for condition in (owner.get("status") or {}).get("conditions", [])
        )
        family = GaugeMetricFamily(
            f"{PREFIX}_conditions",
            "TrainingSessions and SamplerPools, by condition.",
            labels=["kind", "namespace", "condition", "status", "reason"],
        )
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        return family

    def _replicas(self) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}_pool_replicas",
            "Replicas of a sampler pool: wanted by its spec, or ready.",
            labels=["namespace", "pool", "state"],
        )
        for pool in (owner for owner in self._owners() if owner["kind"] == POOL_KIND):
            place = [pool["metadata"]["namespace"], pool["metadata"]["name"]]
            family.add_metric([*place, "wanted"], pool["spec"].get("replicas", 1))
            family.add_metric([*place, "ready"], (pool.get("status") or {}).get("readyReplicas", 0))
        return family

    def _idle_gpu_seconds(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}_idle_gpu_seconds",
            "GPU seconds that suspensions of an idle session or pool have left to others.",
            labels=["kind", "namespace", "name"],
        )
        now = datetime.now(UTC)
        for owner in (owner for owner in self._owners() if (owner.get("status") or {}).get("idle")):
            metadata = owner["metadata"]
            family.add_metric(
                [owner["kind"], metadata["namespace"], metadata["name"]], gpus_of(owner) * idle_seconds(owner, now)
            )
        return family

    def _certificate_ends(self) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}_certificate_expiry_timestamp_seconds",
            "End of each certificate that the operator issued, in Unix time.",
            labels=["namespace", "secret"],
        )
        for namespace, secret, not_after in self._certificates():
            family.add_metric([namespace, secret], not_after.timestamp())
        return family


def gpus_of(owner: Manifest) -> int:
    """Return the GPUs of all pods of a session or pool."""
    spec = effective_spec(owner)
    limits = (spec.get("resources") or {}).get("limits") or {}
    pods = spec.get("replicas", 1) if owner["kind"] == POOL_KIND else (spec.get("parallelism") or {}).get("nodes", 1)
    return int(parse_quantity(limits.get(GPU, 0))) * int(pods)


def idle_seconds(owner: Manifest, now: datetime) -> float:
    """Return how long a session or pool has been suspended because of idleness, in all."""
    idle = owner["status"]["idle"]
    began = parse_time(idle.get("suspendedTime"))
    present = max(0.0, (now - began).total_seconds()) if began is not None else 0.0
    return float(idle.get("suspendedSeconds", 0)) + present
