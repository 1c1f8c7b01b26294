"""TrainingSessions, SamplerPools and an installation for tests of the operator."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import API_VERSION, POOL_KIND, SESSION_KIND
from tinsmith_operator.api.sampler_pool import SamplerPool, parse_pool
from tinsmith_operator.api.training_session import TrainingSession, parse_session
from tinsmith_operator.installation import Installation

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
IMAGE = "tinsmith.local/tinsmith/trainer:0.1.0"

ON_CLAIM: Manifest = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "path": "qwen"}}
FROM_HUB: Manifest = {
    "type": "Hub",
    "hub": {"repository": "Qwen/Qwen3-8B", "revision": "main", "tokenSecretRef": {"name": "hub", "key": "token"}},
}

INSTALLATION = Installation(
    namespace="tinsmith-system",
    release="tinsmith",
    trainer_image=IMAGE,
    trainer_image_pull_policy="IfNotPresent",
    checkpoint_root="file:///var/lib/tinsmith/checkpoints",
    checkpoint_claim="checkpoints",
    hang_timeout_seconds=600,
)


def session_manifest(name: str = "qwen", *, source: Manifest = ON_CLAIM, **spec: Any) -> Manifest:
    """Return a session as a user writes it, numbered by the API server. Further arguments are fields of the spec."""
    return {
        "apiVersion": API_VERSION,
        "kind": SESSION_KIND,
        "metadata": {
            "name": name,
            "namespace": "research",
            "uid": "session-uid",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": format_time(NOW),
        },
        "spec": {"model": {"name": "Qwen/Qwen3-8B", "source": source}, **spec},
    }


def make_session(name: str = "qwen", **spec: Any) -> TrainingSession:
    return parse_session(session_manifest(name, **spec))


def pool_manifest(name: str = "qwen", *, source: Manifest = ON_CLAIM, **spec: Any) -> Manifest:
    """Return a pool as a user writes it, numbered by the API server. Further arguments are fields of the spec."""
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
