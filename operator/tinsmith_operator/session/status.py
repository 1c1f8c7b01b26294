"""The status of a session as it should read now."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Truth, move_conditions
from tinsmith_operator.api.names import endpoint
from tinsmith_operator.api.status import Condition, CountedPod, Restarts, TrainingSessionStatus
from tinsmith_operator.common.actions import Action, Emit, EventType
from tinsmith_operator.common.bars import CLAIM
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.requests import answered_requests, request_events, snapshot_request
from tinsmith_operator.common.status_events import status_changes
from tinsmith_operator.session.claim import volume_size
from tinsmith_operator.session.group import group_run
from tinsmith_operator.session.situation import Situation

# A busy worker snapshots all the time. Written every minute, the times of 600 sessions alone were the whole default
# request rate; `tinsmith_snapshot_age_seconds` reports the age without a write.
SNAPSHOT_TIME_MAY_LAG = timedelta(minutes=10)


def write_status(situation: Situation, conditions: tuple[ConditionState, ...]) -> tuple[Action, ...]:
    """Nothing when it reads so already, or when the time of a snapshot is all that is new and it may still lag."""
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
    """Return the Event about a claim that replaced another, since conditions soon report the new worker as ready."""
    if before.worker_id in (None, after.worker_id) or before.first_ready_time is None:
        return ()
    said = (
        f"{CLAIM} {situation.session.claim_name} is not the one that the worker had before. If it is a new one, its "
        "journal is empty, and every adapter that was not saved is lost: resume programs from their checkpoints. "
        "Before you delete a claim, save the adapters."
    )
    return (Emit(EventType.WARNING, "JournalReplaced", said),)


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
        endpoint=endpoint(session.name, session.namespace),
        worker_id=claim["metadata"]["uid"] if claim is not None else before.worker_id,
        volume_size=volume_size(claim) if claim is not None else before.volume_size,
        first_ready_time=_first_ready_time(situation, moved),
        epoch=report.epoch if report is not None else before.epoch,
        adapters=situation.adapters,
        restarts=count_restarts(before.restarts, pod, is_hung=situation.is_hung),
        last_snapshot_time=_snapshot_time(situation),
        requests=answered_requests(
            session, pod.restart_request if pod is not None else None, situation.observed.snapshot
        ),
        snapshot_seconds=_steadied(before.snapshot_seconds, report),
        image=situation.image_plan.pins.image.reference,
        image_digest=_image_digest(situation),
        node_name=pod.node_name if pod is not None else None,
        group=group_run(situation),
    )


def _first_ready_time(situation: Situation, conditions: tuple[Condition, ...]) -> datetime | None:
    """Never changed again: before it, no worker of this session has acknowledged anything."""
    before, pod = situation.session.status.first_ready_time, situation.pod
    if before is not None or pod is None or not pod.is_ready:
        return before
    ready = next(condition for condition in conditions if condition.type == ConditionType.READY)
    return ready.last_transition_time if ready.status == Truth.TRUE else situation.now.replace(microsecond=0)


def _snapshot_time(situation: Situation) -> datetime | None:
    """To the minute; to the second, rounded up, for a snapshot that was asked for: the client waits for a time that is
    not before its request.
    """
    before, report, answer = situation.session.status.last_snapshot_time, situation.report, situation.observed.snapshot
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
    """Grows at once and shrinks by halves: it changes the StatefulSet."""
    if report is None or report.snapshot_seconds <= 0:
        return before
    measured = math.ceil(report.snapshot_seconds)
    return measured if before is None or measured > before or measured * 2 < before else before


def _image_digest(situation: Situation) -> str | None:
    """The pinned one; of an image that came from no registry, what the node calls it."""
    image, pod, before = situation.image_plan.pins.image, situation.pod, situation.session.status
    if image.digest is not None:
        return image.digest
    if pod is not None and pod.image_id is not None and pod.journal_image == image.reference:
        return pod.image_id
    return before.image_digest if before.image == image.reference else None


def count_restarts(before: Restarts, pod: Pod | None, *, is_hung: bool) -> Restarts:
    """Adds what has happened to this pod since it was last counted. Counting twice what is there adds it once."""
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
