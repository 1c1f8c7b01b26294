"""Tables that map Kubernetes' messages about pods and other objects to reasons of conditions.

The messages were copied from the source code of the API server, the scheduler and the kubelet. If a message is in no
table, a condition quotes it under a general reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tinsmith_operator.api.reasons import Reason

ADMISSION: tuple[tuple[re.Pattern[str], Reason], ...] = (
    # A webhook's own message may look like a message below, so this table matches the text around it first.
    (re.compile(r"failed calling webhook|failed to call webhook"), Reason.WEBHOOK_UNREACHABLE),
    (re.compile(r"admission webhook \"[^\"]*\" denied the request|denied request: "), Reason.ADMISSION_DENIED),
    (re.compile(r"violates PodSecurity "), Reason.ADMISSION_DENIED),
    (re.compile(r"exceeded quota: |insufficient quota to |status unknown for quota: "), Reason.QUOTA_EXCEEDED),
    (re.compile(r"failed quota: "), Reason.RESOURCES_REFUSED),
    (re.compile(r"(?:minimum|maximum) \S+ usage per |max limit to request ratio per "), Reason.RESOURCES_REFUSED),
    (re.compile(r"because it is being terminated"), Reason.NAMESPACE_TERMINATING),
)
"""Messages with which the API server refuses an object at admission."""

SCHEDULER: Mapping[str, Reason] = {
    "Unschedulable": Reason.UNSCHEDULABLE,
    "SchedulerError": Reason.UNSCHEDULABLE,
    "SchedulingGated": Reason.SCHEDULING_GATED,
}
"""The reasons of the condition PodScheduled with the status False."""

QUEUE_GATES = "kueue.x-k8s.io/"
"""The prefix of Kueue's scheduling gates. A pod with such a gate waits in a queue."""

DISRUPTIONS: Mapping[str, tuple[Reason, str]] = {
    "PreemptionByScheduler": (Reason.PREEMPTED, "was preempted by a pod of higher priority"),
    "TerminationByKubelet": (Reason.EVICTED, "was terminated by its node"),
    "EvictionByEvictionAPI": (Reason.RESTARTING, "was evicted, for example because its node is being drained"),
    "DeletionByTaintManager": (Reason.RESTARTING, "does not tolerate a new taint of its node"),
    "DeletionByPodGC": (Reason.RESTARTING, "was on a node that is gone"),
}
"""The reasons of the condition DisruptionTarget of a pod that is terminating."""

ENDINGS: Mapping[str, Reason] = {
    "Evicted": Reason.EVICTED,
    "Terminated": Reason.EVICTED,
    "NodeShutdown": Reason.EVICTED,
    "Preempting": Reason.PREEMPTED,
    "Preempted": Reason.PREEMPTED,
}
"""The reasons in the status of a failed pod.

For all other reasons, the node did not admit the pod: UnexpectedAdmissionError, OutOfcpu, OutOfnvidia.com/gpu,
TopologyAffinityError, VolumeAttachmentLimitExceeded and more.
"""

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
"""The reasons of a container that waits for an image."""

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
"""The reasons of Events about a pod whose network, runtime or devices the node cannot set up."""
PROVISIONING_EVENTS = frozenset({"ProvisioningFailed"})
CREATION_EVENTS = frozenset(
    {
        "FailedCreate",
        # KubeRay's messages about a RayCluster.
        "FailedToCreateHeadPod",
        "FailedToCreateWorkerPod",
        "InvalidRayClusterSpec",
        "InvalidRayClusterMetadata",
    }
)


def why_not_admitted(message: str) -> Reason | None:
    """Return the reason for an admission message.

    Return None for an unknown message, for example about an invalid field.
    """
    return next((reason for words, reason in ADMISSION if words.search(message)), None)


def why_ended(status_reason: str) -> Reason:
    return ENDINGS.get(status_reason, Reason.NODE_REFUSES_POD)
