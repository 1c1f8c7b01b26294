"""The deletion of a session.

With `whenDeleted: Retain`, the operator does nothing: Kubernetes deletes the children together with the session, and
the claim is kept. With `whenDeleted: Delete`, a finalizer keeps the session until the adapters are saved to the
checkpoint root, the worker has stopped, and the claim is deleted.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from tinsmith_operator.api.base import Manifest, parse_time
from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.names import CLAIM_FINALIZER, SKIP_FINALIZER_ANNOTATION
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.common.actions import Action, AddFinalizer, Decision, Delete, Emit, EventType, RemoveFinalizer
from tinsmith_operator.common.conditions import standard_conditions
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.drift import ensure_child
from tinsmith_operator.session.jobs import end_conversion, end_image_pull
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.status import upgrade_state, write_status
from tinsmith_operator.session.workload import delete_workload, ensure_access, stop_orphans

LOOK_AGAIN_SECONDS = 10.0

SKIPPED = Emit(
    EventType.WARNING,
    "FinalizerSkipped",
    f"The annotation {SKIP_FINALIZER_ANNOTATION} is true: no adapter was saved as a checkpoint, and the claim is kept.",
)


def ensure_finalizer(situation: Situation) -> tuple[AddFinalizer | RemoveFinalizer, ...]:
    """Add the finalizer if the claim must be deleted together with the session.

    If the claim must be kept, remove the finalizer.
    """
    session = situation.session
    if session.spec.storage.deletes_claim == session.has_finalizer:
        return ()
    return (RemoveFinalizer(CLAIM_FINALIZER),) if session.has_finalizer else (AddFinalizer(CLAIM_FINALIZER),)


def skips_finalizer(session: TrainingSession) -> bool:
    """Return whether a user has asked to delete the session without its adapters being saved."""
    return session.annotations.get(SKIP_FINALIZER_ANNOTATION) == "true"


def decide_deletion(situation: Situation) -> Decision:
    """Return the next step of the deletion.

    The session gives up its turn to restart, because the session's node may never come back.
    """
    if situation.session.has_finalizer and skips_finalizer(situation.session):
        return Decision((SKIPPED, RemoveFinalizer(CLAIM_FINALIZER)), wants_turn=False)
    return replace(_next_step(situation), wants_turn=False)


def _next_step(situation: Situation) -> Decision:
    session = situation.session
    if not session.has_finalizer:
        return Decision(())
    if not session.spec.storage.deletes_claim:
        return Decision((RemoveFinalizer(CLAIM_FINALIZER),))
    why = "its session is being deleted"
    if ended := (*end_conversion(situation, why), *end_image_pull(situation, why)):
        return Decision(ended)
    if waits_for_checkpoints(situation):
        return _report(situation, wake(situation), waits=True)
    # Pods are deleted with their workload, after a snapshot. Pods without a workload are deleted separately.
    steps = stop_orphans(situation) or delete_workload(situation.owned.workload, why)
    if steps or situation.owned.writer is not None:
        return _report(situation, steps, waits=False)
    return Decision(_release_claim(situation))


def _report(situation: Situation, actions: tuple[Action, ...], *, waits: bool) -> Decision:
    """Return the actions and the status. `waits` says whether the deletion still waits for checkpoints."""
    deleting = found(Reason.DELETING, "The worker stops; then its volume is deleted.")
    finding = _waiting_words(situation) if waits else situation.lost_node or deleting
    standard = standard_conditions(finding, finding, situation.lost_node)
    if waits and _waiting_since(situation) is None:
        # The grace period starts now. So the condition needs a new time even if its status does not change.
        standard = tuple(replace(each, begins=each.type is ConditionType.RECONCILING) for each in standard)
    slots = found(Reason.NOT_REPORTED, "The session is being deleted.") if waits else deleting
    no_slots = ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, slots)
    status = write_status(situation, (*standard, no_slots, upgrade_state(situation, image_pull=None)))
    return Decision((*status, *actions), LOOK_AGAIN_SECONDS)


def _waiting_words(situation: Situation) -> Finding:
    seconds = situation.installation.delete_grace_seconds
    return found(
        Reason.WAITING_FOR_CHECKPOINTS,
        f"Saving adapters to the checkpoint root before the volume is deleted, for at most {seconds:g} s.",
    )


def _release_claim(situation: Situation) -> tuple[Action, ...]:
    """Remove the finalizer. If the session was allowed to use the claim, delete the claim.

    A claim of an earlier session that does not match the spec is kept. If the session must have no worker, the claim is
    kept, too, because the adapters were not saved.
    """
    claim = situation.claim
    release = RemoveFinalizer(CLAIM_FINALIZER)
    if claim is None or situation.claim_plan.is_terminating or situation.owned.claim is None:
        return (release,)
    if situation.blocking_reason is not None:
        return (release,)
    metadata = claim["metadata"]
    why = "its session is being deleted with spec.storage.retentionPolicy.whenDeleted: Delete"
    return (Delete("PersistentVolumeClaim", metadata["name"], metadata["uid"], why), release)


def waits_for_checkpoints(situation: Situation) -> bool:
    """Return whether a worker may still hold adapters that are not saved.

    The wait ends when the worker reports that no adapters are left, when the grace period is over, or when the worker
    was stopped.
    """
    session, pod = situation.session, situation.owned.writer
    if _is_stopping(session) or _grace_is_over(situation) or not _may_hold_adapters(situation):
        return False
    is_there = pod is not None and not pod.is_terminating
    return (is_there or _comes_back(situation) or _can_wake(situation)) and not _is_saved(situation)


def wake(situation: Situation) -> tuple[Action, ...]:
    """Start a worker for a session that was suspended before its deletion, so that the worker saves the adapters."""
    session, observed, worker = situation.session, situation.observed, situation.worker
    if worker is None or not _can_wake(situation) or _is_under_way(situation):
        return ()
    # Run the image that the volume records, because another image may refuse to replay the journal.
    image = situation.pins.image if situation.pins is not None else worker.image
    woken = replace(worker, image=image, replicas=1)
    workload = build_workload(session, situation.installation, woken)
    return (*ensure_access(situation), *ensure_child(observed, observed.workload, workload))


def _is_under_way(situation: Situation) -> bool:
    """Return whether the spec requests a worker, or a pod still mounts the volume."""
    observed = situation.observed
    if observed.workload is None:
        return observed.pod is not None
    return situation.owned.workload is None or situation.owned.workload.wants_pods


def _is_stopping(session: TrainingSession) -> bool:
    """Return whether the session's worker was stopped.

    The condition Ready is not used, because Ready may report a lost node instead.
    """
    return any(condition.reason == Reason.DELETING for condition in session.status.conditions)


def _waiting_since(situation: Situation) -> datetime | None:
    """Return when the wait for checkpoints began, by the clock of the operator.

    The deletion time in the session's metadata is not used, because the API server's clock may differ.
    """
    reconciling = situation.session.status.condition(ConditionType.RECONCILING)
    if reconciling is None or reconciling.reason != Reason.WAITING_FOR_CHECKPOINTS:
        return None
    return reconciling.last_transition_time


def _grace_is_over(situation: Situation) -> bool:
    since = _waiting_since(situation)
    return since is not None and situation.now >= since + timedelta(seconds=situation.installation.delete_grace_seconds)


def _is_saved(situation: Situation) -> bool:
    """Return whether the present worker has reported, since the wait began, that no adapters are left."""
    since, pod, report = _waiting_since(situation), situation.owned.writer, situation.observed.report
    if since is None or pod is None or report is None or report.pod_uid != pod.uid:
        return False
    return report.received_at >= since and report.adapters_used == 0


def _may_hold_adapters(situation: Situation) -> bool:
    """Return whether a worker was ever ready on this volume, for this session or an earlier session."""
    session, pod, claim = situation.session, situation.owned.writer, situation.claim
    noted = session.status.first_ready_time is not None or session.status.epoch is not None
    if noted or situation.observed.report is not None or (pod is not None and pod.is_ready):
        return True
    return claim is not None and not _was_made_for(session, claim)


def _was_made_for(session: TrainingSession, claim: Manifest) -> bool:
    """Return whether the claim was created together with the session or later."""
    made_at = parse_time(claim["metadata"].get("creationTimestamp"))
    return made_at is not None and session.creation_time is not None and made_at >= session.creation_time


def _comes_back(situation: Situation) -> bool:
    """Return whether the workload creates the pod again after an eviction or the loss of the node."""
    workload = situation.owned.workload
    return workload is not None and workload.wants_pods and not workload.is_terminating


def _can_wake(situation: Situation) -> bool:
    """Return whether the session may use the volume, and the workload may create pods."""
    if situation.claim is None or situation.claim_plan.is_terminating or situation.blocking_reason is not None:
        return False
    return not situation.session.spec.is_group or situation.observed.no_groups is None
