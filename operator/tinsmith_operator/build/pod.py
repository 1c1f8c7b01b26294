"""The template of a pod that serves a model, with the container's flags, environment and probes."""

from __future__ import annotations

import itertools
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.names import (
    HEALTH_PORT,
    INPUTS_ANNOTATION,
    RESTART_REQUEST_ANNOTATION,
    RPC_PORT,
    WORKER_CONTAINER,
)
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.serving_spec import Model, ModelSource, PodOverrides, Resources, ServingSpec, SourceType
from tinsmith_operator.build.metadata import child_labels
from tinsmith_operator.build.volumes import (
    HOME_PATH,
    HUB_CACHE_PATH,
    MODELS_PATH,
    TLS_PATH,
    Mounted,
    mounts,
    pod_volumes,
)
from tinsmith_operator.installation import Installation

USER_ID = 65532

POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


PULL_POLICIES = ("Always", "IfNotPresent", "Never")
PULL_FIELDS = frozenset({"image_pull_policy", "image_pull_secrets"})
"""The fields that determine how a node pulls the image. These fields do not change which program runs."""


def pull_variants(overrides: Manifest, pull_secrets: Sequence[Manifest]) -> Iterator[Manifest]:
    """Yield variants of the pod's overrides: one variant for each way in which a node may pull the same image.

    `pull_secrets` are the pull Secrets of the live pod.
    """
    rest = {name: value for name, value in overrides.items() if name not in PULL_FIELDS}
    for policy, secrets in itertools.product((None, *PULL_POLICIES), ((), tuple(pull_secrets))):
        fetching = {"image_pull_policy": policy, "image_pull_secrets": list(secrets)}
        yield {**rest, **{name: value for name, value in fetching.items() if value}}


def build_pod_metadata(owner: Owner, overrides: PodOverrides, inputs: str, restart: str | None = None) -> Manifest:
    """Return the metadata of a pod template. The operator's labels take precedence over labels of a user.

    - `inputs`: the hash of the pod's inputs.
    - `restart`: the request for a restart that the pod carries out.
    """
    requested = {RESTART_REQUEST_ANNOTATION: restart} if restart is not None else {}
    return {
        "labels": {**overrides.labels, **child_labels(owner)},
        "annotations": {**overrides.annotations, **requested, INPUTS_ANNOTATION: inputs},
    }


def build_pod_spec(
    overrides: PodOverrides, grace_seconds: int, container: Manifest, volumes: Sequence[Mounted]
) -> Manifest:
    return {
        **_as_the_user_wrote(overrides),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": pod_volumes(volumes),
    }


def _as_the_user_wrote(pod: PodOverrides) -> Manifest:
    fields = {
        "nodeSelector": pod.node_selector,
        "tolerations": pod.tolerations,
        "affinity": pod.affinity,
        "runtimeClassName": pod.runtime_class_name,
        "schedulerName": pod.scheduler_name,
        "priorityClassName": pod.priority_class_name,
        "serviceAccountName": pod.service_account_name,
        "imagePullSecrets": pod.image_pull_secrets,
    }
    return {field: value for field, value in fields.items() if value}


STARTUP_PERIOD_SECONDS = 5
TERMINATION_LOG = "/dev/termination-log"
"""The file with the termination message of a container; the kubelet reads this file."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
TRACING_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
OWN_VARIABLES = frozenset({"HOME", "HF_HOME", "HF_TOKEN", THREADS_VARIABLE})

SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def build_container(
    spec: ServingSpec,
    installation: Installation,
    image: str,
    arguments: Sequence[str],
    volumes: Sequence[Mounted],
    *,
    variables: Sequence[Manifest] = (),
    processes: int = 1,
) -> Manifest:
    """Return the container.

    - `variables`: the variables that the engine needs.
    - `processes`: the number of processes that share the container's threads.
    """
    pod = spec.pod
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": image,
        "imagePullPolicy": pod.image_pull_policy or installation.trainer_image_pull_policy,
        "args": [escape_dollars(argument) for argument in arguments],
        "env": _environment(spec, installation, variables, processes),
        **checkpoint_secrets(installation),
        "ports": [
            {"name": "rpc", "containerPort": RPC_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
        ],
        "securityContext": SECURITY,
        "volumeMounts": mounts(volumes),
        **_probes(pod.startup_timeout_seconds),
    }
    if resources := spec.resources.model_dump(mode="json", exclude_defaults=True):
        container["resources"] = resources
    return container


def command_line(options: Mapping[str, str | int | None]) -> list[str]:
    """Return the flags for all options that are not None.

    `=` joins a flag and its value, because a value may begin with a dash.
    """
    return [f"--{option}={value}" for option, value in options.items() if value is not None]


def model_options(model: Model) -> dict[str, str]:
    return {**_source_options(model.source), "model-name": model.name}


def listen_options() -> dict[str, str]:
    """Return the flags for the addresses on which the process serves calls and the kubelet's probes."""
    return {
        "listen": f"0.0.0.0:{RPC_PORT}",
        "tls-directory": TLS_PATH,
        "health-address": f"0.0.0.0:{HEALTH_PORT}",
    }


def identity_options(worker_id: str) -> dict[str, str]:
    """Return the options for the worker's ID and for the path of the termination message."""
    return {"worker-id": worker_id, "termination-log": TERMINATION_LOG}


def _source_options(source: ModelSource) -> dict[str, str]:
    match source.type:
        case SourceType.PERSISTENT_VOLUME_CLAIM:
            assert source.persistent_volume_claim is not None
            return {"model": posixpath.normpath(f"{MODELS_PATH}/{source.persistent_volume_claim.path}")}
        case SourceType.HUB:
            assert source.hub is not None
            return {"model": source.hub.repository, "model-revision": source.hub.revision}


def escape_dollars(argument: str) -> str:
    """Escape dollar signs, because the kubelet replaces $(NAME) in arguments."""
    return argument.replace("$", "$$")


def installation_variables(installation: Installation, users: Sequence[Manifest]) -> list[Manifest]:
    """Return the variables for a remote checkpoint root and for traces, without variables that the user sets."""
    names = {variable["name"] for variable in users}
    variables = sorted(installation.checkpoint_environment.items())
    if installation.tracing_endpoint is not None:
        variables.append((TRACING_VARIABLE, installation.tracing_endpoint))
    return [{"name": name, "value": value} for name, value in variables if name not in names]


def checkpoint_secrets(installation: Installation) -> Manifest:
    """Return the value of the container's `envFrom`.

    If the Secret is missing, the kubelet does not start the container.
    """
    secret = installation.checkpoint_secret
    return {"envFrom": [{"secretRef": {"name": secret}}]} if secret is not None else {}


def _environment(
    spec: ServingSpec, installation: Installation, variables: Sequence[Manifest], processes: int
) -> list[Manifest]:
    users = spec.pod.env
    return [*model_environment(spec, variables, processes), *installation_variables(installation, users), *users]


def model_environment(spec: ServingSpec, variables: Sequence[Manifest] = (), processes: int = 1) -> list[Manifest]:
    """Return the variables of a process that loads the model, without variables that the user sets."""
    environment: list[Manifest] = [
        {"name": "HOME", "value": HOME_PATH},
        {"name": "HF_HOME", "value": HUB_CACHE_PATH},
    ]
    hub = spec.model.source.hub
    if hub is not None and hub.token_secret_ref is not None:
        token = {"secretKeyRef": hub.token_secret_ref.to_manifest()}
        environment.append({"name": "HF_TOKEN", "valueFrom": token})
    threads = {"name": THREADS_VARIABLE, "value": str(max(1, thread_count(spec.resources) // processes))}
    names = {variable["name"] for variable in spec.pod.env}
    return [*environment, *(variable for variable in (threads, *variables) if variable["name"] not in names)]


def thread_count(resources: Resources) -> int:
    """Return the number of threads of a process.

    The number depends only on the spec, not on the node, so that a replay gives identical sums.
    """
    cpu = resources.limits.get("cpu", resources.requests.get("cpu", 1))
    return max(1, math.ceil(parse_quantity(cpu)))


def _probes(startup_timeout_seconds: int) -> Manifest:
    """Return the probes. The startup probe succeeds after the load and the replay.

    The liveness probe checks the event loop, but not the GPU.
    """
    return {
        "startupProbe": {
            **_grpc_probe("readiness"),
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": math.ceil(startup_timeout_seconds / STARTUP_PERIOD_SECONDS),
        },
        "readinessProbe": {**_grpc_probe("readiness"), "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**_grpc_probe("liveness"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def _grpc_probe(service: str) -> Manifest:
    return {"grpc": {"port": HEALTH_PORT, "service": service}}
