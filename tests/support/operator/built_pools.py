"""Pools of several kinds, and all that is built for each: for the golden files, and for an API server to accept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from support.operator.resources import FROM_HUB, INSTALLATION, make_pool
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.build.deployment import build_budget, build_deployment, build_sampler_template
from tinsmith_operator.build.network import build_certificate_secret, build_pool_policy, build_service
from tinsmith_operator.installation import Installation

REMOTE = replace(
    INSTALLATION,
    checkpoint_root="s3://checkpoints/tinsmith",
    checkpoint_claim=None,
    checkpoint_environment={"AWS_ENDPOINT_URL_S3": "https://store.example.com:9000"},
    checkpoint_secret="checkpoint-store",
)

EVERYTHING_OF_A_POOL: dict[str, Any] = {
    "replicas": 3,
    "adapters": {"maxLoaded": 16, "maxRank": 32},
    "maxSequenceLength": 8192,
    "resources": {"requests": {"cpu": 2, "memory": "16Gi"}, "limits": {"memory": "24Gi"}},
    "pod": {
        "labels": {"team": "research"},
        "annotations": {"example.com/owner": "ada"},
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "sampling", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "cpu", "operator": "In", "values": ["new"]}]}]
                }
            }
        },
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"},
            {"maxSkew": 2, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        "schedulerName": "default-scheduler",
        "priorityClassName": "sampling",
        "serviceAccountName": "sampler",
        "imagePullSecrets": [{"name": "registry"}],
        "image": "registry.example.com/trainer:2",
        "imagePullPolicy": "Always",
        "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
        "terminationGracePeriodSeconds": 1200,
        "sharedMemory": "2Gi",
        "startupTimeoutSeconds": 3600,
    },
}


@dataclass(frozen=True)
class BuiltPool:
    pool: SamplerPool
    installation: Installation = INSTALLATION
    restart: str | None = None

    def objects(self) -> list[Manifest]:
        pool, installation = self.pool, self.installation
        return [
            build_certificate_secret(pool),
            build_service(pool),
            build_pool_policy(pool, installation),
            build_deployment(pool, pool.spec.replicas, build_sampler_template(pool, installation, self.restart)),
            build_budget(pool),
        ]


VLLM: dict[str, Any] = {
    "engine": "vllm",
    "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}},
    "pod": {"image": "registry.example.com/sampler-gpu:1", "runtimeClassName": "nvidia"},
}

BUILT_POOLS = {
    "pool-minimal": BuiltPool(make_pool()),
    "pool-full": BuiltPool(make_pool(**EVERYTHING_OF_A_POOL), restart="2026-01-31T12:00:00Z"),
    "pool-hub": BuiltPool(make_pool(source=FROM_HUB, replicas=0), REMOTE),
    "pool-gpu": BuiltPool(
        make_pool(
            resources={"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
            pod={"runtimeClassName": "nvidia", "sharedMemory": "8Gi"},
        )
    ),
    "pool-vllm": BuiltPool(make_pool(**VLLM, serverArguments=["--gpu-memory-utilization=0.85"])),
}
