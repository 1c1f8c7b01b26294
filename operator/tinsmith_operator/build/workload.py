"""The workload of a session: a StatefulSet with one pod, or a RayCluster with several pods."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import QUEUE_LABEL, WORKER_CONTAINER
from tinsmith_operator.api.training_session import Engine, TrainingSession, TrainingSessionSpec
from tinsmith_operator.build.metadata import child_labels, child_metadata, member_selector, sealed, selector_labels
from tinsmith_operator.build.parallelism import engine_variables, engine_volumes, shared_bytes
from tinsmith_operator.build.pod import (
    SECURITY,
    build_pod_metadata,
    build_pod_spec,
    escape_dollars,
    model_environment,
    thread_count,
)
from tinsmith_operator.build.volumes import model_volumes, mounts
from tinsmith_operator.build.worker import WorkerPlan, grace_seconds, inputs_hash, worker_template
from tinsmith_operator.installation import Installation


def build_workload(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """Return a StatefulSet if the session has one pod.

    If the session has several pods, return a RayCluster, which KubeRay runs.
    """
    build = build_ray_cluster if session.spec.is_group else build_stateful_set
    return build(session, installation, plan)


def build_stateful_set(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """Return the StatefulSet.

    The update strategy is OnDelete, so only the operator restarts a worker after a change of the template.
    """
    return sealed(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": child_metadata(session, session.workload_name),
            "spec": {
                "replicas": plan.replicas,
                "serviceName": session.workload_name,
                "selector": {"matchLabels": selector_labels(session)},
                "podManagementPolicy": "Parallel",
                "updateStrategy": {"type": "OnDelete"},
                "revisionHistoryLimit": 2,
                "template": worker_template(session, installation, plan),
            },
        }
    )


VERSION_ON_CPUS = "2.60.0"
VERSIONS_ON_GPUS: Mapping[Engine, str] = {Engine.NEMO_RL: "2.56.1", Engine.MILES: "2.57.0"}
"""The version of Ray in each of the project's images: with only megatron-core, with NeMo RL, and with Miles."""

GCS_PORT = 6379
"""The port of the Global Control Service on the head; members connect to this port."""
RAYLET_PORT = 6380
"""The port of the raylet. The raylet listens while its pod belongs to the group."""

OWN_ADDRESS = "POD_IP"
POD_ADDRESS: Manifest = {"name": OWN_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}

# Ray needs many open files, and some nodes allow too few. Ray would also mistake the files of an earlier run of the
# container for a Ray that still runs.
PREPARE_RAY = """ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
rm -rf /tmp/ray/*"""

OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
WITH_A_TOKEN = {"mode": "token"}
"""The authentication of Ray.

KubeRay issues a token for each RayCluster, so even without a NetworkPolicy, other pods cannot run programs in a
cluster.
"""

MEMBERS_GROUP = "members"

# Each rank inherits Ray's environment, but only the worker needs the credentials for checkpoints.
WITHOUT_CREDENTIALS = "env $(compgen -A export AWS_ | sed 's/^/-u /')"

AFTER_THE_HEAD_SECONDS = 30
HEAD_FILE = "/tmp/head"

# A TCP connection shows that the head listens, at no cost to the head. The kubelet expands no variables in a hook.
WAIT_FOR_THE_HEADS_END = f"""head="$(cat {HEAD_FILE})"
while timeout 2 bash -c "exec 3<>/dev/tcp/$head/{GCS_PORT}" 2>/dev/null; do sleep 1; done
"""


def build_ray_cluster(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """Return a RayCluster of a fixed size. After a change of the template, only the operator restarts pods."""
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
                **_suspended(installation, plan),
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


def _suspended(installation: Installation, plan: WorkerPlan) -> Manifest:
    """Return the field `suspend`, unless a queue controls it."""
    return {} if QUEUE_LABEL in installation.ray_cluster_labels else {"suspend": plan.replicas == 0}


def _head_template(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """Return the template of the worker's pod. The container starts Ray first and then the worker."""
    template = worker_template(session, installation, plan)
    [worker] = template["spec"]["containers"]
    head = {
        **worker,
        "command": shell(_head_script(session.spec), "head"),
        "args": [*worker["args"], escape_dollars(f"--ray-address=127.0.0.1:{GCS_PORT}")],
        "env": [*worker["env"], POD_ADDRESS],
        "ports": [*worker["ports"], {"name": "gcs-server", "containerPort": GCS_PORT, "protocol": "TCP"}],
    }
    return {**template, "spec": {**template["spec"], "containers": [head]}}


def _head_script(spec: TrainingSessionSpec) -> str:
    options = start_options(thread_count(spec.resources), spec, shared_bytes(spec))
    address = f'--port={GCS_PORT} --node-ip-address="${OWN_ADDRESS}"'
    start = f"{WITHOUT_CREDENTIALS} ray start --head {address} --include-dashboard=false {options}"
    return f'{PREPARE_RAY}\n{start}\nexec python3 -m tinsmith_trainer "$@"\n'


def build_member_template(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    spec = session.spec
    volumes = engine_volumes(spec, model_volumes(spec))
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": plan.image.runs,
        "imagePullPolicy": spec.pod.image_pull_policy or installation.trainer_image_pull_policy,
        "command": shell(_member_script(session), "member"),
        "env": [*model_environment(spec, engine_variables(spec), spec.ranks_per_node), *spec.pod.env, POD_ADDRESS],
        "ports": [{"name": "raylet", "containerPort": RAYLET_PORT, "protocol": "TCP"}],
        "securityContext": SECURITY,
        "volumeMounts": mounts(volumes),
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/bash", "-ec", WAIT_FOR_THE_HEADS_END]}}},
        **_member_probes(spec),
    }
    if resources := spec.resources.model_dump(mode="json", exclude_defaults=True):
        container["resources"] = resources
    metadata = build_pod_metadata(session, spec.pod, inputs_hash(session, installation, plan), plan.restart)
    labels = {**metadata["labels"], **child_labels(session), **member_selector(session)}
    return {
        "metadata": {**metadata, "labels": {**labels, "app.kubernetes.io/component": "member"}},
        "spec": {
            **build_pod_spec(spec.pod, grace_seconds(session) + AFTER_THE_HEAD_SECONDS, container, volumes),
            # In a pod of KubeRay, a shell waits for the head. A shell that is the first process of its PID namespace
            # would ignore SIGTERM, and a deletion would take the whole grace period.
            "shareProcessNamespace": True,
        },
    }


def _member_script(session: TrainingSession) -> str:
    spec = session.spec
    options = start_options(thread_count(spec.resources), spec, shared_bytes(spec))
    head = f"{session.workload_name}.{session.namespace}.svc"
    return f"""{PREPARE_RAY}
read -r head _ < <(getent ahostsv4 {head})
echo "$head" > {HEAD_FILE}
exec ray start --address="$head:{GCS_PORT}" --node-ip-address="${OWN_ADDRESS}" --block {options}
"""


def _member_probes(spec: TrainingSessionSpec) -> Manifest:
    """Return the probes for Ray.

    The probes do not check the ranks, because a rank may compute or wait for another rank for minutes.
    """
    probe = {"tcpSocket": {"port": RAYLET_PORT}}
    return {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": -(-spec.pod.startup_timeout_seconds // 5)},
        "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
    }


def ray_version(spec: TrainingSessionSpec, installation: Installation) -> str:
    own = VERSIONS_ON_GPUS[spec.engine] if spec.gpus_per_node else VERSION_ON_CPUS
    return installation.ray_version or own


def shell(script: str, name: str) -> list[str]:
    """Return the command of a container.

    The command receives the arguments of the container. `name` is the name of the shell in error messages.
    """
    return ["/bin/bash", "-ec", escape_dollars(script), name]


def start_options(threads: int, spec: TrainingSessionSpec, shared_memory_bytes: int) -> str:
    """Return the options of `ray start`. Each rank counts as one CPU for Ray, although a rank may have more threads."""
    options = {
        "node-manager-port": RAYLET_PORT,
        "num-cpus": max(threads, spec.ranks_per_node),
        "num-gpus": spec.gpus_per_node,
        # The ranks also use shared memory to communicate with each other.
        "object-store-memory": shared_memory_bytes // 2,
    }
    return " ".join(["--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())])
