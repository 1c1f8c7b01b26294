"""The rules that decide which session or pool owns an object.

The operator never writes or deletes objects of another owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import INPUTS_ANNOTATION, MANAGED_BY_LABEL, MANAGER, SESSION_LABEL
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.common.observed import Observed, Surroundings
from tinsmith_operator.common.pod import Pod, read_pod
from tinsmith_operator.common.workloads import (
    RAY_CLUSTER,
    STATEFUL_SET,
    WORKLOAD_KINDS,
    Job,
    Workload,
    read_job,
)
from tinsmith_operator.policy import Policy

ORPHANED = "an earlier session left it behind, and a Job cannot be changed"


def controller_of(manifest: Manifest) -> Manifest | None:
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def belongs_to(owner: Owner, manifest: Manifest) -> bool:
    """Return whether the object belongs to the owner, according to the UID in the object's owner reference.

    A session's claim has no owner reference.

    An object without a controller belongs to the owner that the object's labels name. Objects without a controller
    remain after `kubectl delete --cascade=orphan` of an earlier owner. The next apply adopts objects without a
    controller.
    """
    controller = controller_of(manifest)
    return _is_orphan_of(owner, manifest) if controller is None else bool(controller["uid"] == owner.uid)


def _is_orphan_of(owner: Owner, manifest: Manifest) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY_LABEL) == MANAGER and labels.get(owner.LABEL) == owner.name


def owned_workload(observed: Surroundings) -> Workload | None:
    workload = observed.workload
    return Workload(workload) if workload is not None and belongs_to(observed.owner, workload) else None


def foreign_objects(observed: Surroundings) -> Iterator[Manifest]:
    """Yield the foreign objects that have the names of the owner's children."""
    for child in observed.owned:
        if child is not None and not belongs_to(observed.owner, child):
            yield child


@dataclass(frozen=True)
class OwnedObjects:
    """The observed objects that belong to the session.

    - `pod`, `members`: the pods of the session's present workload.
    - `writer`: the pod that may still write to the session's volume. The writer may belong to an earlier workload or to
      no workload.
    - `conversion`, `image_pull`: the session's Jobs, each with the pods that the Job started.
    - `converters`: the session's conversion pods, including pods of an earlier Job.
    - `orphans`: pods of the session whose workload was deleted. Only the operator can stop orphans.
    - `foreign`: an object that has the name of a child but does not belong to the session.
    """

    workload: Workload | None
    claim: Manifest | None
    conversion: Job | None
    converters: tuple[Pod, ...]
    image_pull: Job | None
    pod: Pod | None
    members: tuple[Pod, ...]
    writer: Pod | None
    orphans: tuple[Pod, ...]
    foreign: Manifest | None
    has_pod_of_another_kind: bool

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The worker's pod, if it exists, followed by the members."""
        return (*([self.pod] if self.pod is not None else []), *self.members)


def owned_objects(observed: Observed, policy: Policy) -> OwnedObjects:
    session, pod, claim = observed.session, observed.pod, observed.claim
    workload = owned_workload(observed)
    converters = _in_order(observed.converters, policy)
    return OwnedObjects(
        workload=workload,
        claim=claim if claim is not None and _is_claim_of(session, claim) else None,
        conversion=_owned_job(session, observed.conversion, converters),
        converters=converters,
        image_pull=_owned_job(session, observed.image_pull, _in_order(observed.pullers, policy)),
        pod=read_pod(pod, policy) if pod is not None and _is_pod_of(workload, pod) else None,
        members=tuple(read_pod(member, policy) for member in observed.members if _is_pod_of(workload, member)),
        writer=read_pod(pod, policy) if pod is not None and not has_foreign_owner(session, pod) else None,
        orphans=tuple(read_pod(orphan, policy) for orphan in _orphans(observed)),
        foreign=next(_foreign_objects_of_session(observed), None),
        has_pod_of_another_kind=pod is not None and _has_another_kind(session, pod),
    )


def _in_order(pods: Sequence[Manifest], policy: Policy) -> tuple[Pod, ...]:
    """Return the pods in order, the latest last."""
    ordered = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    return tuple(read_pod(pod, policy) for pod in ordered)


def _owned_job(session: TrainingSession, job: Manifest | None, pods: Sequence[Pod]) -> Job | None:
    return read_job(job, pods) if job is not None and belongs_to(session, job) else None


def has_foreign_owner(session: TrainingSession, pod: Manifest) -> bool:
    """Return whether the name of the pod's workload differs from the name of the session's workload."""
    labels = pod["metadata"].get("labels") or {}
    controller = controller_of(pod)
    of_our_name = controller is None or (controller["kind"] in WORKLOAD_KINDS and controller["name"] == session.name)
    return labels.get(SESSION_LABEL) != session.name or not of_our_name


def _is_claim_of(session: TrainingSession, claim: Manifest) -> bool:
    """Return whether the claim was made for the session, according to the labels of the claim.

    The labels decide, because a claim has no owner reference.
    """
    if session.spec.storage.existing_claim is not None:
        return False
    labels = claim["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY_LABEL) == MANAGER and labels.get(SESSION_LABEL) == session.name


def _is_pod_of(workload: Workload | None, pod: Manifest) -> bool:
    controller = controller_of(pod)
    return workload is not None and controller is not None and controller["uid"] == workload.uid


def _has_another_kind(session: TrainingSession, pod: Manifest) -> bool:
    """Return whether the pod belongs to an earlier session with this name and another kind of workload."""
    controller = controller_of(pod)
    kind = RAY_CLUSTER if session.spec.is_group else STATEFUL_SET
    return controller is not None and controller["kind"] in WORKLOAD_KINDS - {kind}


def _orphans(observed: Observed) -> Iterator[Manifest]:
    """Yield the pods without a workload. A new StatefulSet adopts an existing pod, but KubeRay does not adopt pods."""
    if observed.workload is not None and observed.workload["kind"] != RAY_CLUSTER:
        return
    for pod in (observed.pod, *observed.members):
        if pod is not None and _is_orphaned(observed.session, pod):
            yield pod


def _is_orphaned(session: TrainingSession, pod: Manifest) -> bool:
    made_by_us = INPUTS_ANNOTATION in (pod["metadata"].get("annotations") or {})
    return made_by_us and controller_of(pod) is None and not has_foreign_owner(session, pod)


def _foreign_objects_of_session(observed: Observed) -> Iterator[Manifest]:
    """Yield the foreign objects of the session. A foreign claim and a foreign pod are included."""
    yield from foreign_objects(observed)
    session, claim = observed.session, observed.claim
    if claim is not None and session.spec.storage.existing_claim is None and not _is_claim_of(session, claim):
        yield claim
    if observed.pod is not None and has_foreign_owner(session, observed.pod):
        yield observed.pod
