"""SamplerPools for tests of the operator."""

from __future__ import annotations

from typing import Any

from support.training_sessions import ON_CLAIM
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import API_VERSION, POOL_KIND
from tinsmith_operator.model.pool import SamplerPool, parse_pool


def pool_manifest(name: str = "qwen", *, source: Manifest = ON_CLAIM, **spec: Any) -> Manifest:
    """As a user writes it, and the API server numbers it. Further arguments are fields of the spec."""
    return {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "metadata": {
            "name": name,
            "namespace": "research",
            "uid": "pool-uid",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {"model": {"name": "Qwen/Qwen3-8B", "source": source}, "replicas": 1, **spec},
    }


def make_pool(name: str = "qwen", **spec: Any) -> SamplerPool:
    return parse_pool(pool_manifest(name, **spec))
