"""A session that is being deleted.

With Retain there is nothing to do: its children go with it, by their owner, and its claim stays. With Delete a
finalizer holds it until its adapters are saved elsewhere, its worker has stopped, and its claim is deleted.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from tinsmith_operator.api.base import Manifest, parse_time
from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.names import CLAIM_FINALIZER
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.common.actions import Action, AddFinalizer, Decision, Delete, RemoveFinalizer
from tinsmith_operator.common.conditions import standard_conditions
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.drift import ensure_child
from tinsmith_operator.session.jobs import end_conversion, end_image_pull
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.status import upgrade_state, write_status
from tinsmith_operator.session.workload import delete_workload, ensure_access, stop_orphans

LOOK_AGAIN_SECONDS = 10.0


def ensure_finalizer(situation: Situation) -> tuple[AddFinalizer | RemoveFinalizer, ...]:
    """On a living session: there only where its claim is to go with it."""
    session = situation.session
    if session.spec.storage.deletes_claim == session.has_finalizer:
        return ()
    return (RemoveFinalizer(CLAIM_FINALIZER),) if session.has_finalizer else (AddFinalizer(CLAIM_FINALIZER),)


def decide_deletion(situation: Situation) -> Decision:
    """It gives its turn to restart to another session: it may wait for its node for good."""
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
    # The pods go with their workload, and take their time for a snapshot; those that lost it are deleted one by one.
    steps = stop_orphans(situation) or delete_workload(situation.owned.workload, why)
    if steps or situation.owned.writer is not None:
        return _report(situation, steps, waits=False)
    return Decision(_release_claim(situation))


def _report(situation: Situation, actions: tuple[Action, ...], *, waits: bool) -> Decision:
    """waits: for checkpoints, before anything is stopped."""
    deleting = found(Reason.DELETING, "The worker stops; then its volume is deleted.")
    finding = _waiting_words(situation) if waits else situation.lost_node or deleting
    standard = standard_conditions(finding, finding, situation.lost_node)
    if waits and _waiting_since(situation) is None:
        # From now on the grace is counted, so it must be said although the session was not ready for other reasons.
        standard = tuple(replace(each, begins=each.type is ConditionType.RECONCILING) for each in standard)
    slots = found(Reason.NOT_REPORTED, "The session is being deleted.") if waits else deleting
    no_slots = ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, slots)
    status = write_status(situation, (*standard, no_slots, upgrade_state(situation, image_pull=None)))
    return Decision((*status, *actions), LOOK_AGAIN_SECONDS)


def _waiting_words(situation: Situation) -> Finding:
    seconds = situation.installation.delete_grace_seconds
    return found(
        Reason.WAITING_FOR_CHECKPOINTS,
        f"Before the volume is deleted, adapters are saved to the checkpoint root, for at most {seconds:g} s.",
    )


def _release_claim(situation: Situation) -> tuple[Action, ...]:
    """The claim goes if the session could use it. One from before that it could not is as much its user's as ever, and
    from one that may have no worker nothing was saved."""
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
    """While a worker is there, comes back or can be woken that has not said, since we wait, that it holds no adapter;
    but not for ever, not where there is nothing to save, and not for one that has been told to stop."""
    session, pod = situation.session, situation.owned.writer
    if _is_stopping(session) or _grace_is_over(situation) or not _may_hold_adapters(situation):
        return False
    is_there = pod is not None and not pod.is_terminating
    return (is_there or _comes_back(situation) or _can_wake(situation)) and not _is_saved(situation)


def wake(situation: Situation) -> tuple[Action, ...]:
    """Of a session that waits: starts a worker where none is wanted, or none was made yet. The deletion came after a
    suspension, and is the stronger wish. What an earlier worker reported says nothing of what it took on after that."""
    session, observed, worker = situation.session, situation.observed, situation.worker
    if worker is None or not _can_wake(situation) or _is_under_way(situation):
        return ()
    # The image that the volume knows: another one may refuse what is still to be replayed.
    image = situation.pins.image if situation.pins is not None else worker.image
    woken = replace(worker, image=image, replicas=1)
    wanted = build_workload(session, situation.installation, woken)
    return (*ensure_access(situation), *ensure_child(observed, observed.workload, wanted))


def _is_under_way(situation: Situation) -> bool:
    """Whether a worker is wanted already. Whatever pod is there has the volume until it is gone."""
    observed = situation.observed
    if observed.workload is None:
        return observed.pod is not None
    return situation.owned.workload is None or situation.owned.workload.wants_pods


def _is_stopping(session: TrainingSession) -> bool:
    """Whether its end was decided. `Ready` may name a lost node instead."""
    return any(said.reason == Reason.DELETING for said in session.status.conditions)


def _waiting_since(situation: Situation) -> datetime | None:
    """Return when the operator said that the deletion waits for checkpoints.

    That is by its own clock: the API server's, which dates the deletion, need not agree.
    """
    said = situation.session.status.condition(ConditionType.RECONCILING)
    if said is None or said.reason != Reason.WAITING_FOR_CHECKPOINTS:
        return None
    return said.last_transition_time


def _grace_is_over(situation: Situation) -> bool:
    since = _waiting_since(situation)
    return since is not None and situation.now >= since + timedelta(seconds=situation.installation.delete_grace_seconds)


def _is_saved(situation: Situation) -> bool:
    """By the word of the worker that is there."""
    since, pod, report = _waiting_since(situation), situation.owned.writer, situation.observed.report
    if since is None or pod is None or report is None or report.pod_uid != pod.uid:
        return False
    return report.received_at >= since and report.adapters_used == 0


def _may_hold_adapters(situation: Situation) -> bool:
    """Whether a worker has ever been ready to acknowledge anything on this volume, of this session or of one before.

    The status says it, whatever operator wrote it: those of before `firstReadyTime` noted what the worker reported.
    """
    session, pod, claim = situation.session, situation.owned.writer, situation.claim
    noted = session.status.first_ready_time is not None or session.status.epoch is not None
    if noted or situation.observed.report is not None or (pod is not None and pod.is_ready):
        return True
    return claim is not None and not _was_made_for(session, claim)


def _was_made_for(session: TrainingSession, claim: Manifest) -> bool:
    """Not left by an earlier session of its name."""
    made_at = parse_time(claim["metadata"].get("creationTimestamp"))
    return made_at is not None and session.creation_time is not None and made_at >= session.creation_time


def _comes_back(situation: Situation) -> bool:
    """A pod that was evicted, or whose node went, is made again while its workload wants one."""
    workload = situation.owned.workload
    return workload is not None and workload.wants_pods and not workload.is_terminating


def _can_wake(situation: Situation) -> bool:
    """Whether the volume is this session's and stays for as long as a worker needs it, and pods can and may be made."""
    if situation.claim is None or situation.claim_plan.is_terminating or situation.blocking_reason is not None:
        return False
    return not situation.session.spec.is_group or situation.observed.no_groups is None
