"""Why there is no pod, or why it is not ready, from its status, its warnings and its worker's last words."""

from __future__ import annotations

import re
from datetime import timedelta

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.common import scheduling
from tinsmith_operator.common.diagnosis import found, quoted
from tinsmith_operator.common.observed import Evidence, KubernetesWarning
from tinsmith_operator.common.pod import Ending, Pod

FRESH_RUN = timedelta(seconds=60)
"""So long after a start, the ending before it still says what is the matter: who refuses to start does so at once."""

IMAGE_PROBLEMS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
MOUNT_WARNINGS = frozenset({"FailedMount", "FailedAttachVolume"})
PROVISIONING_WARNINGS = frozenset({"ProvisioningFailed"})
POD_CREATION_WARNINGS = frozenset(
    {
        "FailedCreate",
        # KubeRay's, of a RayCluster.
        "FailedToCreateHeadPod",
        "FailedToCreateWorkerPod",
        "InvalidRayClusterSpec",
        "InvalidRayClusterMetadata",
    }
)
WORKER_REASONS = {
    "ModelNotFound": Reason.MODEL_NOT_FOUND,
    "ModelInvalid": Reason.MODEL_INVALID,
    "ModelCannotLoad": Reason.MODEL_CANNOT_LOAD,
    "ModelChanged": Reason.MODEL_CHANGED,
    "VolumeUnsuitable": Reason.VOLUME_UNSUITABLE,
    "TlsInvalid": Reason.TLS_INVALID,
    "OutOfMemory": Reason.OUT_OF_MEMORY,
}
_MISSING = re.compile(r"(secret|configmap)s? \"[^\"]+\" not found|couldn't find key \S+ in (Secret|ConfigMap)", re.I)


def why_pods_are_missing(refused: str | None) -> Finding:
    """refused: what their controller last heard when it tried to make one."""
    if refused is None:
        return found(Reason.CREATING_OBJECTS, "The pod is being made.")
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in refused else Reason.POD_REFUSED
    return found(reason, f"The pod cannot be created: {quoted(refused)}.")


def why_pod_is_not_ready(pod: Pod | None, evidence: Evidence) -> Finding:
    if pod is None or pod.is_terminating:
        return found(Reason.RESTARTING, "The pod before it has still to go.")
    return _without_node(pod, evidence) or _waiting(pod, evidence) or _ended(pod, evidence) or _loading(pod, evidence)


def why_pod_does_not_run(pod: Pod, evidence: Evidence) -> Finding | None:
    """Of a pod whose container has not run yet, whatever runs in it."""
    return _without_node(pod, evidence) or _waiting(pod, evidence) or _preparing(pod)


def _preparing(pod: Pod) -> Finding | None:
    if pod.running_since is not None:
        return None
    return found(Reason.PREPARING_POD, f"Node {pod.node_name} prepares the pod.")


def _without_node(pod: Pod, evidence: Evidence) -> Finding | None:
    scheduled = pod.condition("PodScheduled")
    if pod.node_name is not None or scheduled.get("status") == "True":
        return None
    if scheduled.get("reason") != "Unschedulable":
        return found(Reason.WAITING_FOR_SCHEDULER, "The pod waits for the scheduler.")
    reason = scheduling.reason_of(scheduled.get("message", ""))
    message = f"The scheduler finds no node: {quoted(scheduled.get('message', ''))}."
    if reason is Reason.CLAIM_UNBOUND and (provisioning := _provisioning_failure(evidence)):
        message = f"The claim gets no volume: {quoted(provisioning.message)}."
    return found(reason, message)


def _provisioning_failure(evidence: Evidence) -> KubernetesWarning | None:
    return evidence.latest(evidence.claim_uid, PROVISIONING_WARNINGS) if evidence.claim_uid is not None else None


def _waiting(pod: Pod, evidence: Evidence) -> Finding | None:
    """Before the container's first start: the image, what its environment needs, its volumes."""
    waiting = pod.waiting
    if waiting is None or waiting.get("reason") == "CrashLoopBackOff":
        return None
    reason, message = waiting.get("reason", ""), quoted(waiting.get("message", ""))
    if reason in IMAGE_PROBLEMS:
        return found(Reason.IMAGE_PULL_FAILED, f"The image {pod.image} cannot be pulled: {message or reason}.")
    if reason == "CreateContainerConfigError":
        known = Reason.SECRET_MISSING if _MISSING.search(message) else Reason.CANNOT_START
        return found(known, f"The container cannot be made: {message}.")
    if reason.endswith("Error"):
        return found(Reason.CANNOT_START, f"The container cannot be started: {message or reason}.")
    mount = evidence.latest(pod.uid, MOUNT_WARNINGS)
    if mount is not None:
        known = Reason.SECRET_MISSING if _MISSING.search(mount.message) else Reason.MOUNT_FAILED
        return found(known, f"Node {pod.node_name} cannot mount a volume: {quoted(mount.message)}.")
    return found(Reason.PREPARING_POD, f"Node {pod.node_name} attaches volumes and pulls the image {pod.image}.")


def _ended(pod: Pod, evidence: Evidence) -> Finding | None:
    """The container has ended, and is down or has just been started again."""
    ending = pod.latest_ending
    if ending is None or (pod.running_since is not None and evidence.now >= pod.running_since + FRESH_RUN):
        return None
    if ending.record is not None:
        return found(WORKER_REASONS.get(ending.record.reason, Reason.CANNOT_START), _last_words(ending.record.message))
    if ending.out_of_memory:
        return found(Reason.OUT_OF_MEMORY, "The worker was killed because it used more memory than its limit.")
    return _crash(pod, ending)


def _crash(pod: Pod, ending: Ending) -> Finding | None:
    if pod.waiting is None:
        return None
    said = f", and said: {quoted(ending.words)}" if ending.words else ""
    return found(
        Reason.CRASH_LOOP,
        f"The worker ended with status {ending.exit_code}, after {pod.restarts} restarts of this pod{said}.",
    )


def _last_words(message: str) -> str:
    return f"The worker refuses to start: {quoted(message)}."


def _loading(pod: Pod, evidence: Evidence) -> Finding:
    if preparing := _preparing(pod):
        return preparing
    does = "loads the model" if evidence.claim_uid is None else "loads the model and replays its journal"
    return found(Reason.LOADING_MODEL, f"The worker on node {pod.node_name} {does}.")
