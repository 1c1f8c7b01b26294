"""The workload, Service, NetworkPolicy, certificate and pods of a session."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS
from tinsmith_operator.api.names import pod_name
from tinsmith_operator.build.network import build_service, build_session_policy
from tinsmith_operator.build.worker import grace_seconds
from tinsmith_operator.common.actions import Action, Annotate, Delete
from tinsmith_operator.common.certificate import certificate_is_foreign, ensure_certificate
from tinsmith_operator.common.drift import ensure_child
from tinsmith_operator.common.queue import holder_name, keep_queue_fields
from tinsmith_operator.common.requeue import annotate_for_retry
from tinsmith_operator.common.workloads import Workload
from tinsmith_operator.session.jobs import end_conversion, end_image_pull
from tinsmith_operator.session.situation import Situation


def ensure_workload(situation: Situation) -> tuple[Action, ...]:
    """Create or update the workload.

    The claim must exist already, because the claim's UID is the worker's ID, and the model must already be converted.
    """
    observed, owned, desired = situation.observed, situation.owned, situation.desired
    if observed.claim_holder is not None:
        # Two sessions that started at the same moment did not see each other. One of them must stop again.
        return delete_workload(owned.workload, "its claim is in use by another session")
    if desired is None:
        return ()
    if observed.workload is None:
        return _begin(situation, desired)
    if owned.workload is not None and owned.workload.is_held:
        return _ensure_held(situation, owned.workload, desired)
    return ensure_child(situation.observed, observed.workload, desired)


def _begin(situation: Situation, desired: Manifest) -> tuple[Action, ...]:
    observed = situation.observed
    if situation.awaits_conversion or situation.owned.has_pod_of_another_kind or certificate_is_foreign(observed):
        return ()
    # A workload that must not run is not created, because a queue would admit and start a suspended workload.
    runs = situation.worker is not None and situation.worker.replicas > 0
    return ensure_child(situation.observed, None, desired) if runs or not situation.session.spec.is_group else ()


def _ensure_held(situation: Situation, live: Workload, desired: Manifest) -> tuple[Action, ...]:
    """Delete a workload that belongs to a queue if the workload must change.

    After the deletion, the operator creates the workload again, and the new workload waits in the queue.
    """
    if situation.worker is None or situation.worker.replicas == 0:
        return delete_workload(
            live, f"the session must stay stopped, and {holder_name(live.manifest)} controls spec.suspend"
        )
    if situation.restart.must_requeue:
        return delete_workload(live, "its inputs have changed, so it has to queue again")
    return ensure_child(situation.observed, live.manifest, keep_queue_fields(live.manifest, desired))


def ensure_access(situation: Situation) -> tuple[Action, ...]:
    session, observed, worker = situation.session, situation.observed, situation.worker
    return (
        *ensure_certificate(observed, worker.worker_id if worker is not None else None, situation.now),
        *ensure_child(observed, observed.service, build_service(session)),
        *ensure_child(observed, observed.policy, build_session_policy(session, situation.installation)),
    )


def retry_refused_pods(situation: Situation) -> tuple[Annotate, ...]:
    live, nodes = situation.owned.workload, situation.session.spec.divided.nodes
    are_there = situation.pod is not None and len(situation.members) >= nodes - 1
    if live is None or not live.wants_pods or are_there:
        return ()
    if situation.evidence.latest(live.uid, CREATION_EVENTS) is None:
        return ()
    return annotate_for_retry(live, situation.session.status, situation.now)


def stop_all(situation: Situation) -> tuple[Delete, ...]:
    """Stop all pods of a session that must have no pods. The worker saves a snapshot before it stops."""
    why = "the session must have no pods"
    return (
        *end_conversion(situation, why),
        *end_image_pull(situation, why),
        *delete_workload(situation.owned.workload, why),
        *stop_orphans(situation),
    )


def delete_workload(workload: Workload | None, why: str) -> tuple[Delete, ...]:
    if workload is None or workload.is_terminating:
        return ()
    return (Delete(workload.kind, workload.name, workload.uid, why),)


def replace_pod(situation: Situation) -> tuple[Delete, ...]:
    """Stop the pod when the workload has the desired template for the next pod.

    The pod saves a snapshot before it stops.

    Members are stopped together with the worker's pod, and remain until the worker's pod is gone.
    """
    pod, live = situation.pod, situation.owned.workload
    if pod is None or pod.is_terminating or live is None:
        return ()
    if situation.worker is None or situation.worker.replicas == 0 or not live.is_observed:
        return ()
    why = _why_replace(situation)
    if why is None:
        return ()
    staying = (member for member in situation.members if not member.is_terminating)
    return (
        Delete("Pod", pod.name, pod.uid, why, grace_seconds(situation.session)),
        *(Delete("Pod", member.name, member.uid, why) for member in staying),
    )


def stop_unadopted(situation: Situation) -> tuple[Delete, ...]:
    """Stop the pods that no workload will adopt.

    A running pod is not stopped if a new StatefulSet will adopt the pod.
    """
    session = situation.session
    adopted = None if session.spec.is_group else pod_name(session.name)
    return tuple(stop for stop in stop_orphans(situation) if stop.name != adopted)


def stop_orphans(situation: Situation) -> tuple[Delete, ...]:
    grace = grace_seconds(situation.session)
    return tuple(
        Delete("Pod", orphan.name, orphan.uid, "its workload is gone, so only the operator stops it", grace)
        for orphan in situation.owned.orphans
        if not orphan.is_terminating
    )


def _why_replace(situation: Situation) -> str | None:
    if situation.restart.must_restart:
        return "its spec or settings have changed since it started"
    if situation.is_hung:
        return "one operation took longer than the hang timeout"
    return None
