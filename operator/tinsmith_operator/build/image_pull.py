"""The Job that pulls another image onto a worker's node while the worker still runs on its own.

Its pod gets the image as the worker's pod would, with the same pull secrets, account and tolerations, runs Python with
nothing to do, and has neither volumes nor credentials. So a reference, a registry or an image that cannot be used is
known before anything is stopped.

The kubelet tries to pull again for as long as the pod is there, so there is no deadline.
"""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import IMAGE_PULL_ANNOTATION, QUEUE_LABEL, WORKER_CONTAINER, image_pull_name
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.container import SECURITY
from tinsmith_operator.build.conversion import NO_GPUS
from tinsmith_operator.build.metadata import child_labels, child_metadata, fingerprint, puller_selector
from tinsmith_operator.build.pod import build_pod_spec
from tinsmith_operator.installation import Installation

COMPONENT = {"app.kubernetes.io/component": "image-pull"}
NO_WORK = ["python3", "-c", "pass"]
MOST_RETRIES = 2
"""Retries of an image that was pulled and does not run: of another architecture, or not a worker's."""
GRACE_SECONDS = 5
RESOURCES: Manifest = {
    "requests": {"cpu": "10m", "memory": "64Mi"},
    "limits": {"cpu": "100m", "memory": "64Mi"},
}
"""All four are named, since a quota may ask for each."""


def build_image_pull(session: TrainingSession, installation: Installation, image: str, node: str) -> Manifest:
    metadata = child_metadata(session, image_pull_name(session.name))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **metadata,
            "labels": {**metadata["labels"], **COMPONENT},
            "annotations": {IMAGE_PULL_ANNOTATION: image_pull_digest(image, node)},
        },
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": MOST_RETRIES,
            "template": _template(session, installation, image, node),
        },
    }


def image_pull_digest(image: str, node: str) -> str:
    """A hash of which image is pulled, and where."""
    return fingerprint({"image": image, "node": node})


def _template(session: TrainingSession, installation: Installation, image: str, node: str) -> Manifest:
    pod = session.spec.pod
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": image,
        "imagePullPolicy": pod.image_pull_policy or installation.trainer_image_pull_policy,
        "command": NO_WORK,
        "env": [NO_GPUS],
        "resources": RESOURCES,
        "securityContext": SECURITY,
    }
    # A queue would hold it until there is room for the worker, which is running.
    users = {name: text for name, text in pod.labels.items() if name != QUEUE_LABEL}
    labels = {**users, **child_labels(session), **puller_selector(session), **COMPONENT}
    spec = build_pod_spec(pod, GRACE_SECONDS, container, [])
    return {
        "metadata": {"labels": labels, "annotations": pod.annotations},
        "spec": {**spec, "affinity": _on_node(node), "restartPolicy": "Never"},
    }


def _on_node(node: str) -> Manifest:
    """Return an affinity to the node's name, as a DaemonSet has: its hostname label may be another."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [{"matchFields": [field]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
