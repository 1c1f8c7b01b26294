"""The words of Kubernetes about a pod or another object, and which of our reasons they are.

The words are those of Kubernetes' own sources, from the API server's admission, the scheduler and the kubelet. What is
in no table here is quoted under a general reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tinsmith_operator.api.reasons import Reason

ADMISSION: tuple[tuple[re.Pattern[str], Reason], ...] = (
    # A webhook's own words may read like one of those below, so its frame comes first.
    (re.compile(r"failed calling webhook|failed to call webhook"), Reason.WEBHOOK_UNREACHABLE),
    (re.compile(r"admission webhook \"[^\"]*\" denied the request|denied request: "), Reason.ADMISSION_DENIED),
    (re.compile(r"violates PodSecurity "), Reason.ADMISSION_DENIED),
    (re.compile(r"exceeded quota: |insufficient quota to |status unknown for quota: "), Reason.QUOTA_EXCEEDED),
    (re.compile(r"failed quota: "), Reason.RESOURCES_REFUSED),
    (re.compile(r"(?:minimum|maximum) \S+ usage per |max limit to request ratio per "), Reason.RESOURCES_REFUSED),
    (re.compile(r"because it is being terminated"), Reason.NAMESPACE_TERMINATING),
)
"""Words of the API server about an object that it does not admit, from any sender."""

SCHEDULER: Mapping[str, Reason] = {
    "Unschedulable": Reason.UNSCHEDULABLE,
    "SchedulerError": Reason.UNSCHEDULABLE,
    "SchedulingGated": Reason.SCHEDULING_GATED,
}
"""Reasons of the condition PodScheduled while it is False."""

QUEUE_GATES = "kueue.x-k8s.io/"
"""The prefix of Kueue's gates: a pod that has one waits in a queue."""

DISRUPTIONS: Mapping[str, tuple[Reason, str]] = {
    "PreemptionByScheduler": (Reason.PREEMPTED, "makes room for a pod of higher priority"),
    "TerminationByKubelet": (Reason.EVICTED, "is ended by its node"),
    "EvictionByEvictionAPI": (Reason.RESTARTING, "was evicted, as when a node is drained"),
    "DeletionByTaintManager": (Reason.RESTARTING, "does not tolerate a taint that its node has got"),
    "DeletionByPodGC": (Reason.RESTARTING, "was on a node that is gone"),
}
"""Reasons of the condition DisruptionTarget, of a pod that is on its way out."""

ENDINGS: Mapping[str, Reason] = {
    "Evicted": Reason.EVICTED,
    "Terminated": Reason.EVICTED,
    "NodeShutdown": Reason.EVICTED,
    "Preempting": Reason.PREEMPTED,
    "Preempted": Reason.PREEMPTED,
}
"""Reasons of a failed pod's status. All others say why its node did not admit it: UnexpectedAdmissionError, OutOfcpu,
OutOfnvidia.com/gpu, TopologyAffinityError, VolumeAttachmentLimitExceeded and more."""

IMAGES = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
"""Reasons for which a container waits for its image."""

MOUNT_EVENTS = frozenset(
    {
        "FailedMount",
        "FailedAttachVolume",
        "FailedMapVolume",
        "FailedMountOnFilesystemMismatch",
    }
)
SANDBOX_EVENTS = frozenset(
    {"FailedCreatePodSandBox", "NetworkNotReady", "FailedPrepareDynamicResources", "FailedValidation", "FailedSync"}
)
"""Events of a pod that its node cannot set up: its network, its runtime, its devices."""
PROVISIONING_EVENTS = frozenset({"ProvisioningFailed"})
CREATION_EVENTS = frozenset(
    {
        "FailedCreate",
        # KubeRay's, of a RayCluster.
        "FailedToCreateHeadPod",
        "FailedToCreateWorkerPod",
        "InvalidRayClusterSpec",
        "InvalidRayClusterMetadata",
    }
)


def why_not_admitted(message: str) -> Reason | None:
    """Return the reason for an admission message; None for words that no table has, such as those about a field."""
    return next((reason for words, reason in ADMISSION if words.search(message)), None)


def why_ended(status_reason: str) -> Reason:
    return ENDINGS.get(status_reason, Reason.NODE_REFUSES_POD)
