"""The Jobs of a session.

The conversion Job converts the session's model once, before the session's pods occupy GPUs. The conversion Job has the
image of the worker, and the flags, environment and volumes that the worker needs for the model. The conversion Job has
no journal, no certificate, no credentials for checkpoints, and no GPU. The conversion Job has no deadline, because its
duration depends on the model, the hub and the volume. A complete conversion Job is kept, because the Job records that
the model is converted.

The image pull Job pulls a new image onto a worker's node while the worker still runs. The pod of the image pull Job has
the pull Secrets, ServiceAccount and tolerations of the worker's pod. The pod of the image pull Job runs Python without
any work, and has neither volumes nor credentials. Because of the image pull Job, the operator notices an unusable image
before it stops the worker. The image pull Job has no deadline, because the kubelet retries the pull as long as the pod
exists.
"""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    CONVERSION_ANNOTATION,
    IMAGE_PULL_ANNOTATION,
    INPUTS_ANNOTATION,
    QUEUE_LABEL,
    WORKER_CONTAINER,
    conversion_name,
    image_pull_name,
)
from tinsmith_operator.api.training_session import TrainingSession, TrainingSessionSpec
from tinsmith_operator.build.metadata import (
    child_labels,
    child_metadata,
    converter_selector,
    fingerprint,
    puller_selector,
)
from tinsmith_operator.build.parallelism import engine_variables, engine_volumes, parallelism_options
from tinsmith_operator.build.pod import (
    SECURITY,
    TERMINATION_LOG,
    build_pod_metadata,
    build_pod_spec,
    command_line,
    escape_dollars,
    model_environment,
    model_options,
)
from tinsmith_operator.build.volumes import model_volumes, mounts
from tinsmith_operator.build.worker import WorkerPlan, inputs_hash
from tinsmith_operator.installation import Installation

COMPONENT = {"app.kubernetes.io/component": "conversion"}
COMMAND = ["python3", "-m", "tinsmith_trainer.conversion"]

MOST_RETRIES = 6
"""The number of retries.

The retries and the pauses between them take ten minutes, so a short outage of the hub does no harm.
"""

FLAGS_REFUSED = 2

GRACE_SECONDS = 30
"""The grace period of the Job's pods. The period is short, because a model that is only partly converted is useless."""

PLAIN_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})

NO_GPUS: Manifest = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
"""A variable that hides the GPUs. If NVIDIA's runtime is a node's default, an image for CUDA would see all GPUs."""


def build_conversion(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    inputs = inputs_hash(session, installation, plan)
    metadata = child_metadata(session, conversion_name(session.name))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **metadata,
            "labels": {**metadata["labels"], **COMPONENT},
            "annotations": {CONVERSION_ANNOTATION: conversion_digest(session, plan), INPUTS_ANNOTATION: inputs},
        },
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": MOST_RETRIES,
            "podFailurePolicy": {"rules": FAILURE_RULES},
            "template": _template(session, installation, plan, inputs),
        },
    }


def conversion_digest(session: TrainingSession, plan: WorkerPlan) -> str:
    """Return a hash of everything that determines the result: the model, the cache, the image, and the use of GPUs."""
    spec = session.spec
    source = spec.model.source.to_manifest()
    cache = spec.model_cache.claim_name if spec.model_cache is not None else None
    decides = {"source": source, "cache": cache, "image": plan.image.reference, "gpus": spec.gpus_per_node > 0}
    return fingerprint(decides)


FAILURE_RULES: list[Manifest] = [
    # A pod that ends because its node is drained does not count as a failure.
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    # A container that refused its flags fails again. A killed process may succeed in a retry, so it does not fail the
    # Job.
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": WORKER_CONTAINER, "operator": "In", "values": [FLAGS_REFUSED]},
    },
]


def _template(session: TrainingSession, installation: Installation, plan: WorkerPlan, inputs: str) -> Manifest:
    """Return the template of the Job's pods. Each pod is kept, with its log, until the Job is deleted."""
    spec = session.spec
    volumes = engine_volumes(spec, model_volumes(spec))
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": plan.image.runs,
        "imagePullPolicy": spec.pod.image_pull_policy or installation.trainer_image_pull_policy,
        "command": COMMAND,
        "args": [escape_dollars(argument) for argument in conversion_arguments(session)],
        "env": [*model_environment(spec, [*engine_variables(spec), NO_GPUS]), *spec.pod.env],
        "securityContext": SECURITY,
        "volumeMounts": mounts(volumes),
    }
    if resources := _resources(spec):
        container["resources"] = resources
    metadata = build_pod_metadata(session, spec.pod, inputs, plan.restart)
    labels = {**metadata["labels"], **child_labels(session), **converter_selector(session), **COMPONENT}
    return {
        "metadata": {**metadata, "labels": labels},
        "spec": {**build_pod_spec(spec.pod, GRACE_SECONDS, container, volumes), "restartPolicy": "Never"},
    }


def conversion_arguments(session: TrainingSession) -> list[str]:
    """Return the worker's arguments, without the arguments for serving."""
    spec = session.spec
    options = {
        **model_options(spec.model),
        "engine": spec.engine.value,
        **parallelism_options(spec),
        "max-rank": spec.adapters.max_rank,
        "max-sequence-length": spec.max_sequence_length,
        "termination-log": TERMINATION_LOG,
        "log-format": "json",
    }
    return command_line(options)


def _resources(spec: TrainingSessionSpec) -> Manifest:
    """Return the resources of one pod of the session, without GPUs and other devices.

    A conversion needs about twice the memory of the model. This memory is free, because the session's pods start only
    later.
    """
    resources = spec.resources.model_dump(mode="json", exclude_defaults=True)
    plain = {
        kind: {name: amount for name, amount in amounts.items() if name in PLAIN_RESOURCES}
        for kind, amounts in resources.items()
    }
    return {kind: amounts for kind, amounts in plain.items() if amounts}


PULL_COMPONENT = {"app.kubernetes.io/component": "image-pull"}
NO_WORK = ["python3", "-c", "pass"]
MOST_PULL_RETRIES = 2
"""The number of retries for an image that was pulled but does not run, for example on a CPU of another architecture."""
PULL_GRACE_SECONDS = 5
PULL_RESOURCES: Manifest = {
    "requests": {"cpu": "10m", "memory": "64Mi"},
    "limits": {"cpu": "100m", "memory": "64Mi"},
}
"""The resources of the pod. All four values are set, because a quota may require any of the four."""


def build_image_pull(session: TrainingSession, installation: Installation, image: str, node: str) -> Manifest:
    metadata = child_metadata(session, image_pull_name(session.name))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **metadata,
            "labels": {**metadata["labels"], **PULL_COMPONENT},
            "annotations": {IMAGE_PULL_ANNOTATION: image_pull_digest(image, node)},
        },
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": MOST_PULL_RETRIES,
            "template": _pull_template(session, installation, image, node),
        },
    }


def image_pull_digest(image: str, node: str) -> str:
    """Return a hash of the image and the node."""
    return fingerprint({"image": image, "node": node})


def _pull_template(session: TrainingSession, installation: Installation, image: str, node: str) -> Manifest:
    pod = session.spec.pod
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": image,
        "imagePullPolicy": pod.image_pull_policy or installation.trainer_image_pull_policy,
        "command": NO_WORK,
        "env": [NO_GPUS],
        "resources": PULL_RESOURCES,
        "securityContext": SECURITY,
    }
    # Without the queue's label. Otherwise the queue would wait for room for a worker that already runs.
    users = {name: text for name, text in pod.labels.items() if name != QUEUE_LABEL}
    labels = {**users, **child_labels(session), **puller_selector(session), **PULL_COMPONENT}
    spec = build_pod_spec(pod, PULL_GRACE_SECONDS, container, [])
    return {
        "metadata": {"labels": labels, "annotations": pod.annotations},
        "spec": {**spec, "affinity": _on_node(node), "restartPolicy": "Never"},
    }


def _on_node(node: str) -> Manifest:
    """Return an affinity that selects the node by name, as in the pods of a DaemonSet.

    The hostname label may differ from the name of the node.
    """
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [{"matchFields": [field]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
