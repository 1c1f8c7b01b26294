"""The findings that sessions and pools have in common.

Findings about objects: name conflicts, refusals, certificates, references that are not allowed. Findings about a pod:
why the pod is missing or not ready. The sources are the pod's status, the Kubernetes Events about the pod, and the
worker's termination message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from tinsmith_operator.api import kubernetes_words as words
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.references import Reference, ReferenceKind, references_of
from tinsmith_operator.common.observed import KubernetesWarning, Surroundings
from tinsmith_operator.common.pod import Ending, Pod, TerminationRecord, node_is_silent
from tinsmith_operator.common.queue import holder_name
from tinsmith_operator.common.redaction import quoted
from tinsmith_operator.installation import Installation

REFUSALS = {
    "PersistentVolumeClaim": Reason.CLAIM_REFUSED,
    "StatefulSet": Reason.OVERRIDES_REFUSED,
    "RayCluster": Reason.OVERRIDES_REFUSED,
    "Deployment": Reason.OVERRIDES_REFUSED,
    "Job": Reason.OVERRIDES_REFUSED,
}
"""The reason to report for a refused object; the key is the kind of the object.

Objects of other kinds contain nothing from the spec.
"""

WARNING_LIFE = timedelta(minutes=20)
"""The age up to which an Event counts.

The controller of a StatefulSet tries again within 17 minutes, so an older Event does not describe the present state.
"""

FRESH_RUN = timedelta(seconds=60)
"""The time after a start for which the end of the container's previous run is still reported.

A worker that refuses to start ends immediately.
"""

WORKER_REASONS = {
    "ModelNotFound": Reason.MODEL_NOT_FOUND,
    "ModelInvalid": Reason.MODEL_INVALID,
    "ModelCannotLoad": Reason.MODEL_CANNOT_LOAD,
    "ModelChanged": Reason.MODEL_CHANGED,
    "NumericsChanged": Reason.NUMERICS_CHANGED,
    "VolumeUnsuitable": Reason.VOLUME_UNSUITABLE,
    "TlsInvalid": Reason.TLS_INVALID,
    "OutOfMemory": Reason.OUT_OF_MEMORY,
}

CLUSTER_CURES = frozenset({Reason.OUT_OF_MEMORY, Reason.TLS_INVALID})
"""The reasons of a refused start with a remedy that names a field or a Secret.

The worker does not know the names of fields and Secrets.
"""

_MISSING = re.compile(r"(secret|configmap)s? \"[^\"]+\" not found|couldn't find key \S+ in (Secret|ConfigMap)", re.I)
_NODES = re.compile(r"^0/(\d+) nodes are available")
# Kubernetes up to 1.33 writes the first form, later versions write the second.
_VOLUME_ELSEWHERE = re.compile(
    r"(\d+) node\(s\) (?:had volume node affinity conflict|didn't match PersistentVolume's node)"
)
_UNNAMED_TAINTS = re.compile(r"(\d+) node\(s\) had untolerated taint\(s\)")
"""The form of the scheduler's messages since Kubernetes 1.34, which do not name the taints."""
_LOST_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.kubernetes.io/out-of-service")


def found(reason: Reason, what: str) -> Finding:
    """Return a finding. The message of the finding says what happened, and then what to do."""
    cure = reason.cure.replace("`", "")
    return Finding(reason, f"{what.rstrip('.')}. {cure}" if cure else what)


def name_conflict(owner: Owner, foreign: Manifest | None) -> Finding | None:
    """Return a finding if a child of the owner cannot be created because a foreign object has the name of the child."""
    if foreign is None:
        return None
    name = f"{foreign['kind']} {foreign['metadata']['name']}"
    return found(
        Reason.NAME_CONFLICT, f"{name} does not belong to this {owner.NOUN}, so the operator does not touch it."
    )


def refusal(refusals: Mapping[str, str]) -> Finding | None:
    """Return a finding for the first refusal.

    `refusals` maps the kind of an object to the message with which the API server refused the object.
    """
    for kind, message in refusals.items():
        reason = _why_refused(kind, message)
        return found(reason, f"The API server refused the {kind}: {quoted(message)}.")
    return None


def _why_refused(kind: str, message: str) -> Reason:
    """Return the reason for a refusal.

    For a claim that a quota or LimitRange refuses, return a reason about storage.
    """
    of_kind, reason = REFUSALS.get(kind, Reason.OBJECT_REFUSED), words.why_not_admitted(message)
    if of_kind is Reason.CLAIM_REFUSED and reason in (Reason.QUOTA_EXCEEDED, Reason.RESOURCES_REFUSED):
        return of_kind
    return reason or of_kind


def ca_problem(observed: Surroundings) -> Finding | None:
    problem = observed.ca_problem
    return found(Reason.CERTIFICATES_NOT_KEPT, quoted(problem)) if problem is not None else None


def missing_certificate(observed: Surroundings) -> Finding | None:
    return ca_problem(observed) if observed.certificate is None else None


@dataclass(frozen=True)
class Evidence:
    """The facts about pods that come from other objects.

    - `warnings`: the Warning Events of the namespace.
    - `claim_uid`: the UID of the journal's claim, or None without a claim.
    - `was_preempted`: the latest pod that ran was preempted, and no pod has run since.
    """

    warnings: tuple[KubernetesWarning, ...]
    now: datetime
    claim_uid: str | None = None
    was_preempted: bool = False

    def latest(self, uid: str, reasons: frozenset[str]) -> KubernetesWarning | None:
        """Return the latest recent warning with one of these reasons about the object with this UID."""
        recent = (
            warning
            for warning in self.warnings
            if warning.uid == uid and warning.reason in reasons and self.now - warning.at < WARNING_LIFE
        )
        return max(recent, key=lambda warning: warning.at, default=None)


def queued(workload: Manifest) -> Finding:
    """Return the finding about a workload with a `spec.suspend` that another manager has set."""
    name = f"{workload['kind']} {workload['metadata']['name']}"
    return found(Reason.QUEUED, f"{name} is suspended by {holder_name(workload)} and starts when that resumes it.")


def why_pods_are_missing(refused: str | None) -> Finding:
    """Return the finding.

    `refused` is the message with which the API server refused the controller's last attempt to create a pod.
    """
    if refused is None:
        return found(Reason.CREATING_OBJECTS, "The pod is being created.")
    reason = words.why_not_admitted(refused) or Reason.POD_REFUSED
    return found(reason, f"The pod cannot be created: {quoted(refused)}.")


def lost_node(pods: Iterable[Pod], now: datetime) -> Finding | None:
    pod = next((pod for pod in pods if node_is_silent(pod, now)), None)
    if pod is None:
        return None
    return found(
        Reason.NODE_UNREACHABLE,
        f"Node {pod.node_name} does not answer. Its pod {pod.name} may still run, so the operator starts no other pod.",
    )


def preempted(evidence: Evidence) -> Finding | None:
    """Return the finding about a pod that waits for a node because the previous pod was preempted."""
    what = "A pod of higher priority preempted the previous pod."
    return found(Reason.PREEMPTED, what) if evidence.was_preempted else None


def why_pod_is_not_ready(pod: Pod | None, evidence: Evidence) -> Finding:
    if pod is None or pod.is_terminating:
        return _leaving(pod)
    if pod.has_failed:
        return why_pod_failed(pod)
    return _without_node(pod, evidence) or _waiting(pod, evidence) or _ended(pod, evidence) or _loading(pod, evidence)


def _leaving(pod: Pod | None) -> Finding:
    if pod is not None and (disruption := words.DISRUPTIONS.get(pod.disruption)) is not None:
        reason, why = disruption
        return found(reason, f"Pod {pod.name} {why}. Waiting for it to terminate.")
    previous = f" {pod.name}" if pod is not None else ""
    return found(Reason.RESTARTING, f"Waiting for the previous pod{previous} to terminate.")


def why_pod_failed(pod: Pod, *, is_one_of_many: bool = False) -> Finding:
    """Return why the node ended the pod or did not admit the pod.

    If `is_one_of_many` is true, many pods fail in the same way, so the message contains no pod name. A message with a
    pod name would change for each pod.
    """
    if pod.latest_ending is not None and not pod.status_reason:
        return found(Reason.RESTARTING, f"Pod {pod.name} has ended. Waiting for it to be removed.")
    message = quoted(": ".join(part for part in (pod.status_reason, pod.status_message) if part))
    reason = words.why_ended(pod.status_reason)
    subject = "A pod" if is_one_of_many else f"Pod {pod.name}"
    return found(reason, f"{subject} on node {pod.node_name} failed: {message}.")


def why_pod_does_not_run(pod: Pod, evidence: Evidence) -> Finding | None:
    """Return why the pod's container has not started yet, or None if the container runs."""
    return _without_node(pod, evidence) or _waiting(pod, evidence) or _preparing(pod)


def _preparing(pod: Pod) -> Finding | None:
    if pod.running_since is not None:
        return None
    return found(Reason.PREPARING_POD, f"Node {pod.node_name} is preparing the pod.")


def _without_node(pod: Pod, evidence: Evidence) -> Finding | None:
    scheduled = pod.condition("PodScheduled")
    if pod.node_name is not None or scheduled.get("status") == "True":
        return None
    known = words.SCHEDULER.get(scheduled.get("reason", ""))
    if known is None:
        return preempted(evidence) or found(Reason.WAITING_FOR_SCHEDULER, "The pod is waiting for the scheduler.")
    if known is Reason.SCHEDULING_GATED:
        return _gated(pod)
    reason = _why_unschedulable(scheduled.get("message", ""))
    message = f"The scheduler finds no node: {quoted(scheduled.get('message', ''))}."
    if reason is Reason.UNSCHEDULABLE and evidence.was_preempted:
        return found(Reason.PREEMPTED, f"A pod of higher priority preempted the previous pod. {message}")
    if reason is Reason.CLAIM_UNBOUND and (provisioning := _provisioning_failure(evidence)):
        message = f"The claim gets no volume: {quoted(provisioning.message)}."
    return found(reason, message)


def _gated(pod: Pod) -> Finding:
    gates = ", ".join(pod.scheduling_gates)
    is_queued = any(gate.startswith(words.QUEUE_GATES) for gate in pod.scheduling_gates)
    reason = Reason.QUEUED if is_queued else Reason.SCHEDULING_GATED
    return found(reason, f"Pod {pod.name} is waiting for its scheduling gates to be removed: {quoted(gates)}.")


def _why_unschedulable(message: str) -> Reason:
    """Return the reason of a condition for a message of the scheduler."""
    if re.search(r'persistentvolumeclaim "[^"]*" not found', message):
        return Reason.CLAIM_MISSING
    if re.search(r'persistentvolumeclaim "[^"]*" is being deleted', message):
        return Reason.CLAIM_TERMINATING
    if "unbound immediate PersistentVolumeClaims" in message:
        return Reason.CLAIM_UNBOUND
    if _is_volume_on_lost_node(message):
        return Reason.VOLUME_ON_LOST_NODE
    return Reason.UNSCHEDULABLE


def _is_volume_on_lost_node(message: str) -> bool:
    """Return whether every node that the pod tolerates is unable to mount the volume."""
    elsewhere, nodes = _VOLUME_ELSEWHERE.search(message), _NODES.search(message)
    if elsewhere is None or nodes is None:
        return False
    if any(taint in message for taint in _LOST_TAINTS):
        return True
    tainted = _UNNAMED_TAINTS.search(message)
    return int(elsewhere[1]) + (int(tainted[1]) if tainted else 0) == int(nodes[1])


def _provisioning_failure(evidence: Evidence) -> KubernetesWarning | None:
    return evidence.latest(evidence.claim_uid, words.PROVISIONING_EVENTS) if evidence.claim_uid is not None else None


def _waiting(pod: Pod, evidence: Evidence) -> Finding | None:
    """Return why the container has not started: a problem with the image, the environment or the volumes."""
    waiting = pod.waiting
    if waiting is None or waiting.get("reason") == "CrashLoopBackOff":
        return None
    reason, message = waiting.get("reason", ""), quoted(waiting.get("message", ""))
    if reason in words.IMAGES:
        return found(Reason.IMAGE_PULL_FAILED, f"The image {pod.image} cannot be pulled: {message or reason}.")
    if reason == "CreateContainerConfigError":
        known = Reason.SECRET_MISSING if _MISSING.search(message) else Reason.CANNOT_START
        return found(known, f"The container cannot be created: {message}.")
    if reason.endswith("Error"):
        return found(Reason.CANNOT_START, f"The container cannot be started: {message or reason}.")
    return _unprepared(pod, evidence)


def _unprepared(pod: Pod, evidence: Evidence) -> Finding:
    """Return why the node has not started a container, according to the warnings about the pod."""
    mount = evidence.latest(pod.uid, words.MOUNT_EVENTS)
    if mount is not None:
        known = Reason.SECRET_MISSING if _MISSING.search(mount.message) else Reason.MOUNT_FAILED
        return found(known, f"Node {pod.node_name} cannot mount a volume: {quoted(mount.message)}.")
    setup = evidence.latest(pod.uid, words.SANDBOX_EVENTS)
    if setup is not None:
        return found(Reason.CANNOT_START, f"Node {pod.node_name} cannot set up the pod: {quoted(setup.message)}.")
    return found(Reason.PREPARING_POD, f"Node {pod.node_name} is attaching volumes and pulling the image {pod.image}.")


def _ended(pod: Pod, evidence: Evidence) -> Finding | None:
    """Return why the container has ended. Call this for a container that is stopped or has just started again."""
    ending = pod.latest_ending
    if ending is None or (pod.running_since is not None and evidence.now >= pod.running_since + FRESH_RUN):
        return None
    if ending.record is not None:
        return _refused_start(pod, ending, ending.record)
    if ending.out_of_memory:
        return found(Reason.OUT_OF_MEMORY, "The worker was killed because it used more memory than its limit.")
    return _crash(pod, ending)


def _crash(pod: Pod, ending: Ending) -> Finding | None:
    if pod.waiting is None:
        return None
    words = f" and said: {ending.last_words}" if ending.last_words else ""
    return found(
        Reason.CRASH_LOOP,
        f"The worker ended with status {ending.exit_code}, after {pod.restarts} restarts of this pod,{words}.",
    )


def _refused_start(pod: Pod, ending: Ending, record: TerminationRecord) -> Finding:
    words = ending.last_words or f"status {ending.exit_code}, {log_hint(pod)}"
    reason = WORKER_REASONS.get(record.reason, Reason.CANNOT_START)
    return found_by_worker(reason, f"The worker refuses to start: {words}.", is_quoted=ending.last_words is not None)


def log_hint(pod: Pod) -> str:
    again = "" if pod.has_ended else " --previous"
    return f"read kubectl logs {pod.name}{again}"


def found_by_worker(reason: Reason, what: str, *, is_quoted: bool) -> Finding:
    """Return the finding.

    Leave out the general advice if the finding quotes a worker, because the worker's message says what to do.

    For some reasons, a worker cannot know what to do; keep the general advice for such reasons.
    """
    return Finding(reason, what) if is_quoted and reason not in CLUSTER_CURES else found(reason, what)


def _loading(pod: Pod, evidence: Evidence) -> Finding:
    if preparing := _preparing(pod):
        return preparing
    does = "loading the model" if evidence.claim_uid is None else "loading the model and replaying its journal"
    return found(Reason.LOADING_MODEL, f"The worker on node {pod.node_name} is {does}.")


CLAIM = "PersistentVolumeClaim"


def blocking_reason(observed: Surroundings, installation: Installation, image: str | None = None) -> Finding | None:
    """Return why a session or pool must not have any pods.

    If a session or pool must not have pods, the operator stops running pods. The pods save a snapshot before they stop,
    and the volume keeps all data. When the reason for having no pods no longer applies, the operator starts the pods
    again.

    `image` is the image that would run if the spec names no image.
    """
    return _read_claim(observed) or _objection(observed, installation, image) or _journal_for_a_model(observed)


def _read_claim(observed: Surroundings) -> Finding | None:
    read = observed.read_claim
    if read is None:
        return None
    return found(
        Reason.CLAIM_IS_READ, f"{CLAIM} {read.claim} (spec.storage.existingClaim) holds the model of {read.reader}."
    )


def _objection(observed: Surroundings, installation: Installation, image: str | None) -> Finding | None:
    """Return the objection to the first reference that the policy does not allow.

    The image in the spec is checked before the pinned image.
    """
    pinned = [Reference("its volume's", ReferenceKind.IMAGE, image)] if image is not None else []
    objection = installation.policy.objection([*references_of(observed.owner), *pinned])
    return found(objection.reason, f"{objection.words}.") if objection is not None else None


def _journal_for_a_model(observed: Surroundings) -> Finding | None:
    read = observed.read_journal
    if read is None:
        return None
    return found(
        Reason.CLAIM_IS_JOURNAL,
        f"{CLAIM} {read.claim} ({read.field}) is the journal of session {read.session}, which alone may mount it.",
    )
