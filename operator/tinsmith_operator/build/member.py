"""The template of a group's pods beside its head: Ray, and the ranks that the head's worker starts there.

A member has no journal, no certificate and no credentials for checkpoints. It finds the head by the name of the
session's Service, and remembers its address: when both are stopped it waits until the head is gone, which gathers
adapters from the members' ranks before it ends.
"""

from __future__ import annotations

from tinsmith_operator.build.container import SECURITY, model_environment, thread_count
from tinsmith_operator.build.metadata import child_labels, member_selector
from tinsmith_operator.build.parallelism import engine_variables, engine_volumes, shared_bytes
from tinsmith_operator.build.plan import WorkerPlan, grace_seconds, inputs_hash
from tinsmith_operator.build.pod import build_pod_metadata, build_pod_spec
from tinsmith_operator.build.ray import (
    GCS_PORT,
    OWN_ADDRESS,
    POD_ADDRESS,
    PREPARE_RAY,
    RAYLET_PORT,
    shell,
    start_options,
)
from tinsmith_operator.build.volumes import model_volumes, mounts
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import WORKER_CONTAINER
from tinsmith_operator.model.session import TrainingSession
from tinsmith_operator.model.spec import TrainingSessionSpec

AFTER_THE_HEAD_SECONDS = 30
HEAD_FILE = "/tmp/head"

# Connecting is enough to see whether it is there, and costs it nothing. The kubelet replaces nothing in a hook.
WAIT_FOR_THE_HEADS_END = f"""head="$(cat {HEAD_FILE})"
while timeout 2 bash -c "exec 3<>/dev/tcp/$head/{GCS_PORT}" 2>/dev/null; do sleep 1; done
"""


def build_member_template(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    spec = session.spec
    volumes = engine_volumes(spec, model_volumes(spec))
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": plan.image.runs,
        "imagePullPolicy": spec.pod.image_pull_policy or installation.trainer_image_pull_policy,
        "command": shell(_script(session), "member"),
        "env": [*model_environment(spec, engine_variables(spec), spec.ranks_per_node), *spec.pod.env, POD_ADDRESS],
        "ports": [{"name": "raylet", "containerPort": RAYLET_PORT, "protocol": "TCP"}],
        "securityContext": SECURITY,
        "volumeMounts": mounts(volumes),
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/bash", "-ec", WAIT_FOR_THE_HEADS_END]}}},
        **_probes(spec),
    }
    if resources := spec.resources.model_dump(mode="json", exclude_defaults=True):
        container["resources"] = resources
    metadata = build_pod_metadata(session, spec.pod, inputs_hash(session, installation, plan), plan.restart)
    labels = {**metadata["labels"], **child_labels(session), **member_selector(session)}
    return {
        "metadata": {**metadata, "labels": {**labels, "app.kubernetes.io/component": "member"}},
        "spec": {
            **build_pod_spec(spec.pod, grace_seconds(session) + AFTER_THE_HEAD_SECONDS, container, volumes),
            # KubeRay has a member wait for the head in a shell. As the first process of its namespace that would be
            # deaf to SIGTERM, and hold up a deletion until the end of its grace.
            "shareProcessNamespace": True,
        },
    }


def _script(session: TrainingSession) -> str:
    spec = session.spec
    options = start_options(thread_count(spec.resources), spec, shared_bytes(spec))
    head = f"{session.workload_name}.{session.namespace}.svc"
    return f"""{PREPARE_RAY}
read -r head _ < <(getent ahostsv4 {head})
echo "$head" > {HEAD_FILE}
exec ray start --address="$head:{GCS_PORT}" --node-ip-address="${OWN_ADDRESS}" --block {options}
"""


def _probes(spec: TrainingSessionSpec) -> Manifest:
    """Whether Ray is there. A rank is never asked: it may compute, or wait for another one, for minutes."""
    ask = {"tcpSocket": {"port": RAYLET_PORT}}
    return {
        "startupProbe": {**ask, "periodSeconds": 5, "failureThreshold": -(-spec.pod.startup_timeout_seconds // 5)},
        "readinessProbe": {**ask, "periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**ask, "periodSeconds": 10, "failureThreshold": 6},
    }
