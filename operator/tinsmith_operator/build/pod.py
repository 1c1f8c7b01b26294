"""The template of a pod that serves a model, whatever its workload is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import INPUTS_ANNOTATION, RESTART_REQUEST_ANNOTATION
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.serving_spec import PodOverrides
from tinsmith_operator.build.metadata import child_labels
from tinsmith_operator.build.volumes import Mounted, pod_volumes

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
FETCHING = frozenset({"image_pull_policy", "image_pull_secrets"})
"""What a node needs to get the image: whoever has it runs the same, however it came."""


def ways_of_fetching(said: Manifest, pull_secrets: Sequence[Manifest]) -> Iterator[Manifest]:
    """What might be said of a pod that runs the same. said: what is. pull_secrets: of the pod that is compared."""
    rest = {name: value for name, value in said.items() if name not in FETCHING}
    for policy, secrets in itertools.product((None, *PULL_POLICIES), ((), tuple(pull_secrets))):
        fetching = {"image_pull_policy": policy, "image_pull_secrets": list(secrets)}
        yield {**rest, **{name: value for name, value in fetching.items() if value}}


def build_pod_metadata(owner: Owner, overrides: PodOverrides, inputs: str, restart: str | None = None) -> Manifest:
    """inputs: the hash of what was said of it. restart: the request to start anew that a pod from this template is the
    answer to. The operator's labels win over a user's.
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
    said = {
        "nodeSelector": pod.node_selector,
        "tolerations": pod.tolerations,
        "affinity": pod.affinity,
        "runtimeClassName": pod.runtime_class_name,
        "schedulerName": pod.scheduler_name,
        "priorityClassName": pod.priority_class_name,
        "serviceAccountName": pod.service_account_name,
        "imagePullSecrets": pod.image_pull_secrets,
    }
    return {field: value for field, value in said.items() if value}
