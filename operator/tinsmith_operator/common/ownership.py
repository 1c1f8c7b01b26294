"""Whose an object is. What is not ours is never written and never deleted."""

from __future__ import annotations

from collections.abc import Iterator

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import INPUTS_ANNOTATION, MANAGED_BY_LABEL, MANAGER, SESSION_LABEL
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.session import TrainingSession
from tinsmith_operator.common.observed import Observed, Surroundings
from tinsmith_operator.common.workload_state import RAY_CLUSTER, WORKLOAD_KINDS


def controller_of(manifest: Manifest) -> Manifest | None:
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def is_ours(owner: Owner, manifest: Manifest) -> bool:
    """Of everything but a session's claim: by the owner's UID, so that a namesake's children are foreign_objects."""
    controller = controller_of(manifest)
    return controller is not None and controller["uid"] == owner.uid


def claim_is_ours(session: TrainingSession, claim: Manifest) -> bool:
    """By its labels: it has no owner, and outlives the session to be taken up again by the next of that name."""
    if session.spec.storage.existing_claim is not None:
        return False
    labels = claim["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY_LABEL) == MANAGER and labels.get(SESSION_LABEL) == session.name


def own_workload(observed: Surroundings) -> Manifest | None:
    """Unless it is a stranger's, of which nothing but its metadata is known."""
    workload = observed.workload
    return workload if workload is not None and is_ours(observed.owner, workload) else None


def pod_is_ours(observed: Observed) -> bool:
    return observed.pod is not None and is_of_own_workload(observed, observed.pod)


def is_of_own_workload(observed: Observed, pod: Manifest) -> bool:
    """By our workload, as it is now."""
    workload, controller = own_workload(observed), controller_of(pod)
    return workload is not None and controller is not None and controller["uid"] == workload["metadata"]["uid"]


def orphaned_pods(observed: Observed) -> tuple[Manifest, ...]:
    """The session's pods after their workload was deleted from above them: nobody but us would ever stop them.

    A StatefulSet that is there again adopts its pod; KubeRay adopts none.
    """
    if observed.workload is not None and observed.workload["kind"] != RAY_CLUSTER:
        return ()
    pods = (pod for pod in (observed.pod, *observed.members) if pod is not None)
    return tuple(pod for pod in pods if _is_orphaned(observed.session, pod))


def _is_orphaned(session: TrainingSession, pod: Manifest) -> bool:
    made_by_us = INPUTS_ANNOTATION in (pod["metadata"].get("annotations") or {})
    return made_by_us and controller_of(pod) is None and not has_foreign_owner(session, pod)


def foreign_objects(observed: Surroundings) -> Iterator[Manifest]:
    """What has the name of one of our children and is not it."""
    for child in observed.owned:
        if child is not None and not is_ours(observed.owner, child):
            yield child


def foreign_objects_of_session(observed: Observed) -> Iterator[Manifest]:
    """Its claim and its pod have no owner reference of ours."""
    yield from foreign_objects(observed)
    session, claim = observed.session, observed.claim
    if claim is not None and session.spec.storage.existing_claim is None and not claim_is_ours(session, claim):
        yield claim
    if observed.pod is not None and has_foreign_owner(session, observed.pod):
        yield observed.pod


def has_foreign_owner(session: TrainingSession, pod: Manifest) -> bool:
    """Not one of an earlier StatefulSet of ours, which goes, nor one that ours is about to adopt."""
    labels = pod["metadata"].get("labels") or {}
    controller = controller_of(pod)
    of_our_name = controller is None or (controller["kind"] in WORKLOAD_KINDS and controller["name"] == session.name)
    return labels.get(SESSION_LABEL) != session.name or not of_our_name
