"""The conditions that sessions and pools share, and the Events that report changes of conditions."""

from __future__ import annotations

from datetime import datetime, timedelta

from tinsmith_operator.api.base import parse_time
from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.api.status import Condition, ReconciledStatus
from tinsmith_operator.common.actions import Action, Emit, EventType, WriteStatus
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.observed import Surroundings
from tinsmith_operator.common.workloads import Workload

AS_WANTED = found(Reason.AS_WANTED, "Everything is as the spec asks.")
BRINGING = found(Reason.CREATING_OBJECTS, "Objects are being updated to the spec.")
PAUSED = found(
    Reason.PAUSED, "The annotation tinsmith.dev/paused is true: the operator reports, and changes nothing. Remove it."
)
FIRST_STATUS_WAIT = timedelta(seconds=2)
"""The time for which the first status waits for the pods of a new workload."""

READY_REASONS = frozenset({Reason.WORKER_READY, Reason.REPLICAS_READY, Reason.TEMPLATE_READY})


def standard_conditions(
    readiness: Finding, progress: Finding, degradation: Finding | None
) -> tuple[ConditionState, ...]:
    """Return all standard conditions, including conditions with the status False.

    The progress message is in Reconciling or Stalled, whichever of the two is True, because tools that read kstatus
    show only that condition.
    """
    nothing = found(Reason.AS_EXPECTED, "No problem apart from what Ready reports.")
    moving, stuck = (progress.reason.progress is each for each in (Progress.MOVING, Progress.STUCK))
    resting = Finding(progress.reason, "Nothing is under way.")
    unhindered = Finding(progress.reason, "No action by a person is needed.")
    return (
        condition(ConditionType.READY, readiness, holds=readiness.reason in READY_REASONS),
        condition(ConditionType.RECONCILING, progress if moving else resting, holds=moving),
        condition(ConditionType.STALLED, progress if stuck else unhindered, holds=stuck),
        condition(ConditionType.DEGRADED, degradation or nothing, holds=degradation is not None),
    )


def may_wait(observed: Surroundings, conditions: tuple[ConditionState, ...]) -> bool:
    """Return whether the first status of a session or pool can wait until its children are created.

    The status then says only that objects are being created. A refusal or a problem that needs a person is written at
    once.
    """
    is_stuck = any(each.type is ConditionType.STALLED and each.truth is Truth.TRUE for each in conditions)
    return not (observed.owner.status.conditions or observed.refusals or is_stuck)


def first_status_time(
    observed: Surroundings, workload: Workload | None, conditions: tuple[ConditionState, ...], now: datetime
) -> datetime | None:
    """Return the time at which a first status that can wait must be written, even if the pods have not started yet.

    Return None if the status cannot wait. Pods that start within this time save a write for each session and pool.
    """
    if workload is None or not workload.wants_pods or not may_wait(observed, conditions):
        return None
    created = parse_time(workload.manifest["metadata"].get("creationTimestamp"))
    return ahead(created + FIRST_STATUS_WAIT if created is not None else None, now)


def ahead(moment: datetime | None, now: datetime) -> datetime | None:
    """Return the time if it is in the future."""
    return moment if moment is not None and moment > now else None


def condition(type_: ConditionType, finding: Finding, *, holds: bool) -> ConditionState:
    return ConditionState(type_, Truth.TRUE if holds else Truth.FALSE, finding)


def upgrade_available(runs: str, next_start: str) -> ConditionState:
    """Return the condition UpgradeAvailable.

    - `runs`: the image in use.
    - `next_start`: the image after a restart.
    """
    if runs == next_start:
        current = found(Reason.IMAGE_CURRENT, f"It runs {runs}, which a restart would keep.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.FALSE, current)
    waits = found(Reason.NEW_DEFAULT_IMAGE, f"It runs {runs}. A restart would use {next_start}.")
    return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, waits)


EVENT_CONDITIONS = (ConditionType.READY, ConditionType.STALLED, ConditionType.DEGRADED, ConditionType.UPGRADE_AVAILABLE)


def status_changes(before: ReconciledStatus, after: ReconciledStatus) -> tuple[Action, ...]:
    """Return the actions that write the status and the Events. If the status is up to date, return no action."""
    if after == _with_own_conditions(before, after):
        return ()
    return (WriteStatus(after.to_manifest()), *_events(before, after))


def _with_own_conditions(before: ReconciledStatus, after: ReconciledStatus) -> ReconciledStatus:
    """Return the status with only the operator's own conditions, in the operator's order.

    Other programs may have added conditions.
    """
    own = (before.condition(condition.type) for condition in after.conditions)
    return before.model_copy(update={"conditions": tuple(condition for condition in own if condition is not None)})


def _events(before: ReconciledStatus, after: ReconciledStatus) -> tuple[Emit, ...]:
    """Return one Event for each new reason, even if several conditions have the same reason."""
    emitted: dict[str, Emit] = {}
    for type_ in EVENT_CONDITIONS:
        condition = after.condition(type_)
        if condition is not None and _is_news(before.condition(type_), condition):
            emitted.setdefault(condition.reason, Emit(_event_type(condition), condition.reason, condition.message))
    return tuple(emitted.values())


def _is_news(before: Condition | None, after: Condition) -> bool:
    if after.type != ConditionType.READY and after.status != Truth.TRUE:
        return False
    if before is None:
        # That the objects of a new session or pool are being created is no news.
        return Reason(after.reason).progress is not Progress.MOVING
    return (before.status, before.reason) != (after.status, after.reason)


def _event_type(condition: Condition) -> EventType:
    """Return the type of the Event: Warning if a person must act, otherwise Normal.

    For example, a pool that is degraded because it was just scaled up needs no action.
    """
    is_stuck = Reason(condition.reason).progress is Progress.STUCK
    return EventType.WARNING if is_stuck else EventType.NORMAL
