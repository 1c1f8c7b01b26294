"""The decision about a TrainingSession.

The decision turns the observed state into actions that reconcile the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from tinsmith_operator.api.conditions import ConditionState
from tinsmith_operator.common.actions import Action, Decision
from tinsmith_operator.common.certificate import renewal_time
from tinsmith_operator.common.conditions import ahead, first_status_time, may_wait
from tinsmith_operator.common.diagnosis import refusal
from tinsmith_operator.common.drift import still_refused
from tinsmith_operator.common.idleness import delete_idle, idle_moments
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.common.requeue import LOOK_FOR_WARNINGS, requeue_after, requeue_times_of
from tinsmith_operator.installation import Installation
from tinsmith_operator.session.claim import ensure_claim, grow_claim
from tinsmith_operator.session.deletion import decide_deletion, ensure_finalizer, skips_finalizer
from tinsmith_operator.session.diagnosis import Diagnosis, diagnose
from tinsmith_operator.session.group import stop_left_behind
from tinsmith_operator.session.jobs import ensure_conversion, ensure_image_pull
from tinsmith_operator.session.situation import Situation, assess
from tinsmith_operator.session.status import desired_conditions, wants_turn, write_status
from tinsmith_operator.session.template import delete_retired, retirement_moments
from tinsmith_operator.session.workload import (
    ensure_access,
    ensure_workload,
    replace_pod,
    retry_refused_pods,
    stop_all,
    stop_unadopted,
)

REPORT_WAIT = timedelta(seconds=2)
"""The time for which the status of a ready worker waits for the worker's first report."""


def decide(observed: Observed, installation: Installation, now: datetime) -> Decision:
    """Return what to do about one session now. This pure function returns the same decision for the same input.

    If decisions are made and carried out repeatedly, a decision without actions follows in the end.
    """
    situation = assess(observed, installation, now)
    if observed.session.is_paused:
        return _report_only(situation)
    if observed.session.is_being_deleted:
        return decide_deletion(situation)
    if finalizer := ensure_finalizer(situation):
        return Decision(finalizer)
    if deletion := (_delete_idle(situation) or delete_retired(situation)):
        return Decision(deletion)
    children = ensure_children(situation)
    diagnosis = diagnose(situation, refusal(still_refused(observed.refusals, children)))
    conditions = desired_conditions(situation, diagnosis, acts=bool(children))
    # The status comes first, so that it is written even if the API server refuses a later action.
    status_time = _status_time(situation, diagnosis, conditions)
    waits = status_time is not None or (children and may_wait(observed, conditions))
    status = () if waits else write_status(situation, conditions)
    actions = (*status, *(children or retry_refused_pods(situation)))
    requeue_seconds = requeue_after((status_time, *_next_looks(situation, diagnosis)), now)
    return Decision(actions, requeue_seconds, wants_turn(situation, diagnosis))


def _status_time(situation: Situation, diagnosis: Diagnosis, conditions: tuple[ConditionState, ...]) -> datetime | None:
    """Return the time until which the status waits, or None if it does not wait.

    A status without the pod, or of a ready worker without its first report, would be replaced within a second.
    """
    if not diagnosis.is_ready:
        return first_status_time(situation.observed, situation.owned.workload, conditions, situation.now)
    if situation.adapters is not None or situation.pod is None or situation.pod.ready_since is None:
        return None
    return ahead(situation.pod.ready_since + REPORT_WAIT, situation.now)


def _report_only(situation: Situation) -> Decision:
    """Return the status of a paused session. A finalizer that a user wants to skip is removed nevertheless."""
    if situation.session.is_being_deleted:
        # The conditions hold the state of the deletion, which continues after the pause.
        skips = skips_finalizer(situation.session)
        return decide_deletion(situation) if skips else Decision((), wants_turn=False)
    conditions = desired_conditions(situation, diagnose(situation, None), acts=False)
    return Decision(write_status(situation, conditions), wants_turn=False)


def ensure_children(situation: Situation) -> tuple[Action, ...]:
    """Return the actions on the children, in the order of dependencies.

    The worker's ID is the UID of the claim, the pod mounts the certificate, and the pod starts only after the model is
    converted. A pod is replaced only after the workload has the desired template.
    """
    if situation.blocking_reason is not None:
        return stop_all(situation)
    observed, claim_plan = situation.observed, situation.claim_plan
    before = (*ensure_claim(observed, claim_plan), *ensure_access(situation), *ensure_conversion(situation))
    workload = ensure_workload(situation)
    replaced = replace_pod(situation) if not workload else ()
    stopped = (*(replaced or stop_left_behind(situation)), *stop_unadopted(situation))
    return (*before, *workload, *stopped, *grow_claim(observed, claim_plan), *ensure_image_pull(situation))


def _delete_idle(situation: Situation) -> tuple[Action, ...]:
    """Return the deletion of an idle session that holds no model. A client that still lives keeps its models."""
    adapters = situation.adapters
    if adapters is None or adapters.used > 0 or situation.session.spec.suspend:
        return ()
    return delete_idle(situation.session, situation.idle, situation.use, situation.now)


def _next_looks(situation: Situation, diagnosis: Diagnosis) -> Iterator[datetime | None]:
    """Yield the times of reconciles that no event triggers."""
    observed = situation.observed
    if observed.certificate is not None:
        yield renewal_time(observed.certificate)
    for each in (*situation.owned.pods, *situation.owned.converters):
        yield from requeue_times_of(each)
    yield from idle_moments(situation.session, situation.idle)
    yield from retirement_moments(situation.session)
    is_awaited = not diagnosis.is_ready or diagnosis.image_pull is not None
    if is_awaited and not situation.is_stopped:
        yield situation.now + LOOK_FOR_WARNINGS
