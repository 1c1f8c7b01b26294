"""The PodDisruptionBudget of a pool."""

from __future__ import annotations

from tinsmith_operator.build.metadata import child_metadata, sealed, selector_labels
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.pool import SamplerPool


def build_budget(pool: SamplerPool) -> Manifest:
    """One sampler at a time may be asked to leave its node; one that does not work may always be."""
    return sealed(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": child_metadata(pool, pool.workload_name),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": selector_labels(pool)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )
