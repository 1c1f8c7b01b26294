"""The operator's settings and metrics, as rows for the reference tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from prometheus_client.core import Metric
from pydantic.fields import FieldInfo
from tinsmith_operator.api.names import POOL_KIND
from tinsmith_operator.kube.resources import ApiCall
from tinsmith_operator.metrics import Metrics
from tinsmith_operator.settings import Settings


def setting_fields() -> Mapping[str, FieldInfo]:
    return Settings.model_fields


def metric_families() -> Iterable[Metric]:
    """Return the metrics of an operator that manages one pool and has sent one request."""
    metrics = Metrics()
    metrics.note_reconcile("settled", 0.0)
    metrics.note_request(ApiCall("create", "services", None), "201")
    status = {"conditions": [{"type": "Ready", "status": "True", "reason": "ReplicasReady"}]}
    pool = {"kind": POOL_KIND, "metadata": {"namespace": "research", "name": "tiny"}, "spec": {}, "status": status}
    certificate = ("research", "tiny-sampler-tls", datetime.now(UTC))
    metrics.watch(
        lambda: 0,
        lambda: True,
        lambda: [pool],
        lambda: [certificate],
        lambda: True,
        lambda: 0,
        unknown_kinds=int,
        clock_offset_seconds=float,
    )
    return metrics.registry.collect()
