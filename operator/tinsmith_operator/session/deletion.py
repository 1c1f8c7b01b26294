"""A session that is being deleted.

With Retain there is nothing to do: its children go with it, by their owner, and its claim stays. With Delete a
finalizer holds it until its adapters are saved elsewhere, its worker has stopped, and its claim is deleted.
"""

from __future__ import annotations

from dataclasses import replace

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.names import CLAIM_FINALIZER
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.common.actions import Action, AddFinalizer, Decision, Delete, RemoveFinalizer
from tinsmith_operator.common.conditions import standard_conditions
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.ownership import claim_is_ours, is_ours
from tinsmith_operator.session.checkpoints import waiting_since, waits_for_checkpoints, wake, worker_pod
from tinsmith_operator.session.claim import is_going
from tinsmith_operator.session.conditions import upgrade_state
from tinsmith_operator.session.conversion import end_conversion
from tinsmith_operator.session.diagnosis import lost_node
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.status import write_status
from tinsmith_operator.session.workload import stop_orphans

LOOK_AGAIN_SECONDS = 10.0


def ensure_finalizer(situation: Situation) -> tuple[AddFinalizer | RemoveFinalizer, ...]:
    """On a living session: there only where its claim is to go with it."""
    session = situation.session
    if session.spec.storage.deletes_claim == session.has_finalizer:
        return ()
    return (RemoveFinalizer(CLAIM_FINALIZER),) if session.has_finalizer else (AddFinalizer(CLAIM_FINALIZER),)


def decide_deletion(situation: Situation) -> Decision:
    session = situation.session
    if not session.has_finalizer:
        return Decision(())
    if not session.spec.storage.deletes_claim:
        return Decision((RemoveFinalizer(CLAIM_FINALIZER),))
    if ended := end_conversion(situation):
        return Decision(ended)
    if waits_for_checkpoints(situation):
        return _wait(situation)
    steps = _stop(situation)
    if steps or worker_pod(situation) is not None:
        return _report_the_end(situation, steps)
    return Decision(_let_go(situation))


def _wait(situation: Situation) -> Decision:
    finding = _waiting_words(situation)
    # From that moment the grace is counted, so it must be told although much else kept the session from being ready.
    begins = waiting_since(situation.session) is None
    states = standard_conditions(finding, finding, lost_node(situation))
    standard = (replace(each, begins=begins and each.type is ConditionType.RECONCILING) for each in states)
    slots = found(Reason.NOT_REPORTED, "The session is being deleted.")
    return _report(situation, (*standard, _no_slots(slots)), wake(situation))


def _report_the_end(situation: Situation, steps: tuple[Delete, ...]) -> Decision:
    deleting = found(Reason.DELETING, "The worker stops; then its volume is deleted.")
    finding = lost_node(situation) or deleting
    standard = standard_conditions(finding, finding, lost_node(situation))
    return _report(situation, (*standard, _no_slots(deleting)), steps)


def _waiting_words(situation: Situation) -> Finding:
    seconds = situation.installation.delete_grace_seconds
    return found(
        Reason.WAITING_FOR_CHECKPOINTS,
        f"Before the volume is deleted, adapters are saved to the checkpoint root, for at most {seconds:g} s.",
    )


def _stop(situation: Situation) -> tuple[Delete, ...]:
    """The pods go with their workload, and take their time for a snapshot; those that lost it go by themselves."""
    if orphans := stop_orphans(situation):
        return orphans
    workload = situation.observed.workload
    if workload is None or not is_ours(situation.session, workload) or "deletionTimestamp" in workload["metadata"]:
        return ()
    metadata = workload["metadata"]
    return (Delete(workload["kind"], metadata["name"], metadata["uid"], "its session is being deleted"),)


def _let_go(situation: Situation) -> tuple[Action, ...]:
    """The claim goes if the session could use it. One from before that it could not is as much its user's as ever."""
    session, claim = situation.session, situation.claim
    release = RemoveFinalizer(CLAIM_FINALIZER)
    if claim is None or is_going(claim) or not claim_is_ours(session, claim):
        return (release,)
    metadata = claim["metadata"]
    why = "its session is being deleted with spec.storage.retentionPolicy.whenDeleted: Delete"
    return (Delete("PersistentVolumeClaim", metadata["name"], metadata["uid"], why), release)


def _no_slots(finding: Finding) -> ConditionState:
    return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, finding)


def _report(situation: Situation, conditions: tuple[ConditionState, ...], actions: tuple[Action, ...]) -> Decision:
    return Decision((*write_status(situation, (*conditions, upgrade_state(situation))), *actions), LOOK_AGAIN_SECONDS)
