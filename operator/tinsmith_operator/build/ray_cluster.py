"""The RayCluster of a session of several pods: KubeRay keeps them.

Its head is the worker's pod, as a session of one pod has it: with the journal, the certificate, the RPC server, and the
labels by which clients find it. Its other pods, the members, hold ranks and nothing else.

KubeRay would put a command of its own into the pods. An annotation forbids that, so that a head runs the worker beside
Ray, and the pods stay what the spec says.
"""

from __future__ import annotations

from tinsmith_operator.build.container import literally, thread_count
from tinsmith_operator.build.member import build_member_template
from tinsmith_operator.build.metadata import child_metadata, sealed
from tinsmith_operator.build.parallelism import shared_bytes
from tinsmith_operator.build.plan import WorkerPlan
from tinsmith_operator.build.ray import (
    GCS_PORT,
    OWN_ADDRESS,
    POD_ADDRESS,
    PREPARE_RAY,
    ray_version,
    shell,
    start_options,
)
from tinsmith_operator.build.worker import worker_template
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.session import TrainingSession
from tinsmith_operator.model.spec import TrainingSessionSpec

OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
WITH_A_TOKEN = {"mode": "token"}
"""KubeRay makes one for each pod: where no NetworkPolicy is enforced, still nobody else runs programs there."""

MEMBERS_GROUP = "members"

# What Ray is started with, each rank inherits; credentials for checkpoints are the worker's alone.
WITHOUT_CREDENTIALS = "env $(compgen -A export AWS_ | sed 's/^/-u /')"


def build_ray_cluster(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """Of a fixed size. KubeRay starts no pod anew because a template changed: that is decided by the operator."""
    metadata, members = child_metadata(session, session.workload_name), session.spec.divided.nodes - 1
    return sealed(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {
                **metadata,
                "labels": {**installation.ray_cluster_labels, **metadata["labels"]},
                "annotations": OWN_COMMAND,
            },
            "spec": {
                "rayVersion": ray_version(session.spec, installation),
                "authOptions": WITH_A_TOKEN,
                "suspend": plan.replicas == 0,
                "headGroupSpec": {"rayStartParams": {}, "template": _head_template(session, installation, plan)},
                "workerGroupSpecs": [
                    {
                        "groupName": MEMBERS_GROUP,
                        "replicas": members,
                        "minReplicas": members,
                        "maxReplicas": members,
                        "rayStartParams": {},
                        "template": build_member_template(session, installation, plan),
                    }
                ],
            },
        }
    )


def _head_template(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """The worker's, whose container starts Ray before the worker."""
    template = worker_template(session, installation, plan)
    [worker] = template["spec"]["containers"]
    head = {
        **worker,
        "command": shell(_head_script(session.spec), "head"),
        "args": [*worker["args"], literally(f"--ray-address=127.0.0.1:{GCS_PORT}")],
        "env": [*worker["env"], POD_ADDRESS],
        "ports": [*worker["ports"], {"name": "gcs-server", "containerPort": GCS_PORT, "protocol": "TCP"}],
    }
    return {**template, "spec": {**template["spec"], "containers": [head]}}


def _head_script(spec: TrainingSessionSpec) -> str:
    options = start_options(thread_count(spec.resources), spec, shared_bytes(spec))
    address = f'--port={GCS_PORT} --node-ip-address="${OWN_ADDRESS}"'
    start = f"{WITHOUT_CREDENTIALS} ray start --head {address} --include-dashboard=false {options}"
    return f'{PREPARE_RAY}\n{start}\nexec python3 -m tinsmith_trainer "$@"\n'
