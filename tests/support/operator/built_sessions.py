"""Sessions of several kinds, and all that is built for each: for the golden files, and for an API server to accept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from support.operator.resources import FROM_HUB, INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.jobs import build_conversion
from tinsmith_operator.build.network import build_certificate_secret, build_service, build_session_policy
from tinsmith_operator.build.volumes import build_claim
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.installation import Installation
from tinsmith_operator.session.upgrade import Pins

DIGEST = "tinsmith.local/tinsmith/trainer@sha256:" + "1f" * 32
REMOTE = replace(INSTALLATION, checkpoint_root="s3://checkpoints/tinsmith", checkpoint_claim=None)
STORE = replace(
    REMOTE,
    checkpoint_environment={"AWS_REGION": "eu-north-1", "AWS_ENDPOINT_URL_S3": "https://store.example.com:9000"},
    checkpoint_secret="store",
)

EVERYTHING: dict[str, Any] = {
    "adapters": {"slots": 16, "maxRank": 32},
    "maxSequenceLength": 8192,
    "sampling": "None",
    "resources": {"requests": {"cpu": 2, "memory": "16Gi"}, "limits": {"memory": "24Gi"}},
    "storage": {"size": "50Gi", "storageClassName": "fast", "accessMode": "ReadWriteOnce"},
    "pod": {
        "labels": {"team": "research"},
        "annotations": {"example.com/owner": "ada"},
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "training", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "cpu", "operator": "In", "values": ["new"]}]}]
                }
            }
        },
        "schedulerName": "default-scheduler",
        "priorityClassName": "training",
        "serviceAccountName": "worker",
        "imagePullSecrets": [{"name": "registry"}],
        "imagePullPolicy": "Always",
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "4"},
            {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api"}}},
        ],
        "terminationGracePeriodSeconds": 600,
        "sharedMemory": "2Gi",
        "startupTimeoutSeconds": 3600,
    },
}

NEMO_RL: dict[str, Any] = {"engine": "nemo-rl", "pod": {"image": "tinsmith.local/tinsmith/trainer-nemo-rl:0.1.0"}}
MILES: dict[str, Any] = {"engine": "miles", "pod": {"image": "tinsmith.local/tinsmith/trainer-miles:0.1.0"}}


def session_of_rank_64(**spec: Any) -> TrainingSession:
    """Return a session with the rank that hashes leave out, so that a golden file shows nothing else."""
    return make_session(**{"adapters": {"maxRank": 64}, **spec})


@dataclass(frozen=True)
class Built:
    session: TrainingSession
    installation: Installation = INSTALLATION
    digest: str | None = None
    replicas: int = 1

    def objects(self) -> list[Manifest]:
        session, installation = self.session, self.installation
        image = PinnedImage(session.spec.pod.image or installation.trainer_image, self.digest)
        plan = WorkerPlan("0b7e4f5c-claim-uid", image, self.replicas)
        claim = build_claim(session, Pins(image).annotations())
        return [
            *([claim] if claim is not None else []),
            build_certificate_secret(session),
            build_service(session),
            build_session_policy(session, installation),
            *([build_conversion(session, installation, plan)] if session.spec.is_converted_once else []),
            build_workload(session, installation, plan),
        ]


BUILT = {
    "minimal": Built(session_of_rank_64()),
    "full": Built(session_of_rank_64(**EVERYTHING), digest=DIGEST),
    "hub": Built(session_of_rank_64(source=FROM_HUB), REMOTE),
    "store": Built(session_of_rank_64(), STORE),
    "gpu": Built(
        session_of_rank_64(
            resources={"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
            pod={
                "runtimeClassName": "nvidia",
                "sharedMemory": "8Gi",
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            },
        )
    ),
    "nemo-rl-cpu": Built(session_of_rank_64(**NEMO_RL, parallelism={"tensor": 2}, resources={"limits": {"cpu": 4}})),
    "nemo-rl-gpus": Built(
        session_of_rank_64(
            source=FROM_HUB,
            **NEMO_RL,
            sampling="None",
            parallelism={"tensor": 4},
            modelCache={"claimName": "models"},
            resources={"limits": {"nvidia.com/gpu": 8, "memory": "512Gi"}},
        )
    ),
    "nemo-rl-two-nodes": Built(
        session_of_rank_64(
            **NEMO_RL,
            sampling="None",
            parallelism={"nodes": 2, "tensor": 8},
            modelCache={"claimName": "models"},
            resources={"limits": {"nvidia.com/gpu": 8, "rdma/hca": 1, "cpu": 64, "memory": "512Gi"}},
        ),
        replace(STORE, ray_cluster_labels={"ray.io/gang-scheduling-enabled": "true"}),
    ),
    "miles-two-nodes": Built(
        session_of_rank_64(
            **MILES,
            sampling="None",
            parallelism={"nodes": 2, "tensor": 8},
            resources={"limits": {"nvidia.com/gpu": 8, "cpu": 64, "memory": "512Gi"}},
        ),
        STORE,
    ),
    "suspended": Built(session_of_rank_64(suspend=True, storage={"existingClaim": "journal-of-ada"}), replicas=0),
}
