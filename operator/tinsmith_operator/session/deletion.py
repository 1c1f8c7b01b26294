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
from tinsmith_operator.session.checkpoints import waits_for_checkpoints, wake
from tinsmith_operator.session.conditions import upgrade_state
from tinsmith_operator.session.conversion import end_conversion
from tinsmith_operator.session.diagnosis import lost_node
from tinsmith_operator.session.image_pull import end_image_pull
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.status import write_status
from tinsmith_operator.session.workload import delete_workload, stop_orphans

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
    return Decision(_let_go(situation))


def _report(situation: Situation, actions: tuple[Action, ...], *, waits: bool) -> Decision:
    """waits: for checkpoints, before anything is stopped."""
    lost, deleting = lost_node(situation), found(Reason.DELETING, "The worker stops; then its volume is deleted.")
    finding = _waiting_words(situation) if waits else lost or deleting
    standard = standard_conditions(finding, finding, lost)
    if waits and situation.waiting_since is None:
        # From now on the grace is counted, so it must be said although the session was not ready for other reasons.
        standard = tuple(replace(each, begins=each.type is ConditionType.RECONCILING) for each in standard)
    slots = found(Reason.NOT_REPORTED, "The session is being deleted.") if waits else deleting
    no_slots = ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, slots)
    status = write_status(situation, (*standard, no_slots, upgrade_state(situation)))
    return Decision((*status, *actions), LOOK_AGAIN_SECONDS)


def _waiting_words(situation: Situation) -> Finding:
    seconds = situation.installation.delete_grace_seconds
    return found(
        Reason.WAITING_FOR_CHECKPOINTS,
        f"Before the volume is deleted, adapters are saved to the checkpoint root, for at most {seconds:g} s.",
    )


def _let_go(situation: Situation) -> tuple[Action, ...]:
    """The claim goes if the session could use it. One from before that it could not is as much its user's as ever, and
    from one that may have no worker nothing was saved."""
    claim = situation.claim
    release = RemoveFinalizer(CLAIM_FINALIZER)
    if claim is None or situation.claim_is_terminating or situation.owned.claim is None or situation.bar is not None:
        return (release,)
    metadata = claim["metadata"]
    why = "its session is being deleted with spec.storage.retentionPolicy.whenDeleted: Delete"
    return (Delete("PersistentVolumeClaim", metadata["name"], metadata["uid"], why), release)
