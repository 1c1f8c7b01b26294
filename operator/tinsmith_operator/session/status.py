"""The status of a session, with its conditions."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth, move_conditions
from tinsmith_operator.api.names import endpoint
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import AdapterUsage, Condition, CountedPod, Restarts, TrainingSessionStatus
from tinsmith_operator.common.actions import Action, Emit, EventType
from tinsmith_operator.common.conditions import (
    AS_WANTED,
    BRINGING,
    PAUSED,
    standard_conditions,
    status_changes,
    upgrade_available,
)
from tinsmith_operator.common.diagnosis import CLAIM, found
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.requests import answered_requests, request_events, snapshot_request
from tinsmith_operator.session.diagnosis import Diagnosis
from tinsmith_operator.session.group import group_run
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.upgrade import runs

# A busy worker writes snapshots all the time. If every snapshot time were written each minute, 600 sessions would use
# the whole default request rate. `tinsmith_snapshot_age_seconds` reports the age without a write.
SNAPSHOT_TIME_MAY_LAG = timedelta(minutes=10)


def write_status(situation: Situation, conditions: tuple[ConditionState, ...]) -> tuple[Action, ...]:
    """Return the action that writes the status.

    Return no action if the status is up to date, or if only the time of a snapshot is new and can wait.
    """
    after = build_status(situation, conditions)
    if _only_the_snapshot_is_new(situation.session.status, after):
        return ()
    before = situation.session.status
    changes = status_changes(before, after)
    requests = request_events(situation.session, after.requests, situation.snapshot)
    return (*changes, *requests, *_replaced_journal(situation, before, after)) if changes else ()


def _replaced_journal(
    situation: Situation, before: TrainingSessionStatus, after: TrainingSessionStatus
) -> tuple[Emit, ...]:
    """Return the Event for a claim that has replaced another claim.

    An Event is used because the conditions soon report the new worker as ready.
    """
    if before.worker_id in (None, after.worker_id) or before.first_ready_time is None:
        return ()
    message = (
        f"{CLAIM} {situation.session.claim_name} is not the claim that the worker had before. If it is new, its "
        "journal is empty, and adapters that were not saved are lost: resume clients from their checkpoints. "
        "Before you delete a claim, save the adapters."
    )
    return (Emit(EventType.WARNING, "JournalReplaced", message),)


def _only_the_snapshot_is_new(before: TrainingSessionStatus, after: TrainingSessionStatus) -> bool:
    earlier, later = before.last_snapshot_time, after.last_snapshot_time
    if earlier is None or later is None or later >= earlier + SNAPSHOT_TIME_MAY_LAG:
        return False
    return not status_changes(before, after.model_copy(update={"last_snapshot_time": earlier}))


def build_status(situation: Situation, conditions: tuple[ConditionState, ...]) -> TrainingSessionStatus:
    session, report, pod = situation.session, situation.report, situation.pod
    before = session.status
    claim = situation.claim
    moved = move_conditions(before.conditions, conditions, generation=session.generation, now=situation.now)
    return TrainingSessionStatus(
        observed_generation=session.generation,
        conditions=moved,
        certificate_expiry_time=situation.observed.certificate_expiry_time,
        idle=situation.idle,
        model=session.spec.model.name,
        engine=session.spec.engine,
        template=before.template,
        endpoint=endpoint(session.name, session.namespace),
        worker_id=claim["metadata"]["uid"] if claim is not None else before.worker_id,
        volume_size=situation.claim_plan.volume_size if claim is not None else before.volume_size,
        first_ready_time=_first_ready_time(situation, moved),
        epoch=report.epoch if report is not None else before.epoch,
        adapters=situation.adapters,
        restarts=count_restarts(before.restarts, pod, is_hung=situation.is_hung),
        last_snapshot_time=_snapshot_time(situation),
        requests=answered_requests(session, pod.restart_request if pod is not None else None, situation.snapshot),
        snapshot_seconds=_steadied(before.snapshot_seconds, report),
        image=situation.image_plan.pins.image.reference,
        image_digest=_image_digest(situation),
        node_name=pod.node_name if pod is not None else None,
        group=group_run(situation),
    )


def _first_ready_time(situation: Situation, conditions: tuple[Condition, ...]) -> datetime | None:
    """Return the time at which the session was ready for the first time.

    Before the session was ready for the first time, no worker of the session accepted a call.
    """
    before, pod = situation.session.status.first_ready_time, situation.pod
    if before is not None or pod is None or not pod.is_ready:
        return before
    ready = next(condition for condition in conditions if condition.type == ConditionType.READY)
    return ready.last_transition_time if ready.status == Truth.TRUE else situation.now.replace(microsecond=0)


def _snapshot_time(situation: Situation) -> datetime | None:
    """Return the time of the latest snapshot, in whole minutes.

    The time of a requested snapshot has seconds and is rounded up, because the client waits for a time after the
    request.
    """
    before, report, answer = situation.session.status.last_snapshot_time, situation.report, situation.snapshot
    if answer is not None and answer.at is not None and answer.request == snapshot_request(situation.session):
        return _up_to_the_second(answer.at)
    moment = report.last_snapshot_time if report is not None else None
    if moment is None:
        return before
    minute = moment.replace(second=0, microsecond=0)
    return max(before, minute) if before is not None else minute


def _up_to_the_second(moment: datetime) -> datetime:
    whole = moment.replace(microsecond=0)
    return whole if whole == moment else whole + timedelta(seconds=1)


def _steadied(before: int | None, report: WorkerReport | None) -> int | None:
    """Return the measured snapshot time, rounded so that the value changes rarely.

    A longer time is returned at once, and a shorter time only below half of the previous time. Each change of the value
    also changes the StatefulSet.
    """
    if report is None or report.snapshot_seconds <= 0:
        return before
    measured = math.ceil(report.snapshot_seconds)
    return measured if before is None or measured > before or measured * 2 < before else before


def _image_digest(situation: Situation) -> str | None:
    """Return the pinned digest.

    If the image did not come from a registry, return the ID that the node gives to the image.
    """
    image, pod, before = situation.image_plan.pins.image, situation.pod, situation.session.status
    if image.digest is not None:
        return image.digest
    if pod is not None and pod.image_id is not None and pod.journal_image == image.reference:
        return pod.image_id
    return before.image_digest if before.image == image.reference else None


def count_restarts(before: Restarts, pod: Pod | None, *, is_hung: bool) -> Restarts:
    """Return the counts, including the pod's restarts since the last count.

    Restarts that are already counted are not counted again.
    """
    if pod is None:
        return before
    counted = (
        before.counted if before.counted is not None and before.counted.uid == pod.uid else CountedPod(uid=pod.uid)
    )
    new = max(0, pod.restarts - counted.container_restarts)
    ending = pod.latest_ending
    out_of_memory = new if ending is not None and ending.out_of_memory else 0
    crashed = new if ending is not None and not ending.out_of_memory and ending.exit_code != 0 else 0
    return Restarts(
        crash=before.crash + crashed,
        out_of_memory=before.out_of_memory + out_of_memory,
        hang=before.hang + (1 if is_hung and not counted.hung else 0),
        counted=CountedPod(
            uid=pod.uid,
            container_restarts=max(pod.restarts, counted.container_restarts),
            hung=is_hung or counted.hung,
        ),
    )


def desired_conditions(situation: Situation, diagnosis: Diagnosis, *, acts: bool) -> tuple[ConditionState, ...]:
    """Return the conditions of a session. `acts` says whether this decision changes an object."""
    serves = found(Reason.WORKER_READY, f"The worker serves {situation.session.spec.model.name}.")
    readiness = serves if diagnosis.is_ready else diagnosis.trouble or serves
    progress = _progress_of_a_ready_session(diagnosis, acts=acts) if diagnosis.is_ready else readiness
    if situation.session.is_paused:
        progress = PAUSED
    standard = standard_conditions(readiness, progress, situation.lost_node or _degradation(diagnosis))
    takes = situation.observed.has_turn and wants_turn(situation, diagnosis)
    upgrade = taking_turn() if takes else upgrade_state(situation, diagnosis.image_pull)
    return (*standard, _slots(situation.adapters if diagnosis.is_ready else None), upgrade)


def wants_turn(situation: Situation, diagnosis: Diagnosis) -> bool:
    """Return whether the session waits for its turn of an automatic restart, or has its turn and does not serve yet."""
    if situation.is_stopped or situation.blocking_reason is not None:
        return False
    is_on_its_way = diagnosis.trouble is not None or diagnosis.image_pull is not None
    # A restart would start a new default image, or apply new settings of the installation.
    upgrade_waits = situation.image_plan.available is not None or situation.restart.settings_differ
    return upgrade_waits or (situation.observed.has_turn and is_on_its_way)


def upgrade_state(situation: Situation, image_pull: Finding | None) -> ConditionState:
    """Return the condition UpgradeAvailable. `image_pull` is the state of an image that is pulled before a restart."""
    plan = situation.image_plan
    if image_pull is not None:
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, image_pull)
    if situation.pod is None or not runs(situation.pod, plan.pins.image) or plan.stop_first:
        starts = found(Reason.IMAGE_CURRENT, f"The next start uses {plan.requested}.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.FALSE, starts)
    if plan.available is None and situation.restart.settings_differ:
        settings = found(Reason.NEW_SETTINGS, "The worker runs with older settings of the installation.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, settings)
    return upgrade_available(plan.pins.image.reference, plan.available or plan.pins.image.reference)


def taking_turn() -> ConditionState:
    """Return the condition of a session that has its turn.

    From the condition, a new leader learns which sessions have a turn.
    """
    turn = found(
        Reason.TAKING_ITS_TURN, "It is this session's turn to restart. The next session waits until it serves again."
    )
    return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, turn)


def _progress_of_a_ready_session(diagnosis: Diagnosis, *, acts: bool) -> Finding:
    """Return what is in progress in a session that is ready. A ready session can still differ from its spec."""
    trouble = diagnosis.refusal or diagnosis.refused_image or diagnosis.image_pull or diagnosis.trouble
    return trouble or (BRINGING if acts else AS_WANTED)


def _degradation(diagnosis: Diagnosis) -> Finding | None:
    return (
        diagnosis.terminating_claim
        or diagnosis.full_volume
        or diagnosis.refused_image
        or _volume_on_lost_node(diagnosis)
        or diagnosis.ca_problem
    )


def _volume_on_lost_node(diagnosis: Diagnosis) -> Finding | None:
    trouble = diagnosis.trouble
    if diagnosis.is_ready or trouble is None or trouble.reason is not Reason.VOLUME_ON_LOST_NODE:
        return None
    return trouble


def _slots(adapters: AdapterUsage | None) -> ConditionState:
    if adapters is None:
        unknown = found(Reason.NOT_REPORTED, "The worker has not reported yet how many places are taken.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, unknown)
    if adapters.used < adapters.capacity:
        free = found(Reason.SLOTS_FREE, f"{adapters.capacity - adapters.used} of {adapters.capacity} places are free.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.TRUE, free)
    used = found(Reason.ALL_SLOTS_USED, f"All {adapters.capacity} places are taken.")
    return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.FALSE, used)
