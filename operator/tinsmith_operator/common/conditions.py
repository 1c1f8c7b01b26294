"""The conditions that sessions and pools have in common, from what was found."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.api.status import Condition, OwnerStatus
from tinsmith_operator.common.actions import Action, Emit, EventType, WriteStatus
from tinsmith_operator.common.diagnosis import found

AS_WANTED = found(Reason.AS_WANTED, "There is nothing left to do.")
BRINGING = found(Reason.CREATING_OBJECTS, "Objects are being updated to what the spec says.")
READY_REASONS = frozenset({Reason.WORKER_READY, Reason.REPLICAS_READY})


def standard_conditions(
    readiness: Finding, progress: Finding, degradation: Finding | None
) -> tuple[ConditionState, ...]:
    """Return all standard conditions, so that a missing one needs no meaning.

    The sentence about the progress stands in Reconciling or in Stalled, whichever is True: tools that read kstatus show
    that one alone.
    """
    nothing = found(Reason.AS_EXPECTED, "Nothing is wrong that Ready would not say.")
    moving, stuck = (progress.reason.progress is each for each in (Progress.MOVING, Progress.STUCK))
    resting = Finding(progress.reason, "The operator and the cluster have nothing under way.")
    unhindered = Finding(progress.reason, "Nothing waits for a person.")
    return (
        condition(ConditionType.READY, readiness, holds=readiness.reason in READY_REASONS),
        condition(ConditionType.RECONCILING, progress if moving else resting, holds=moving),
        condition(ConditionType.STALLED, progress if stuck else unhindered, holds=stuck),
        condition(ConditionType.DEGRADED, degradation or nothing, holds=degradation is not None),
    )


def condition(type_: ConditionType, finding: Finding, *, holds: bool) -> ConditionState:
    return ConditionState(type_, Truth.TRUE if holds else Truth.FALSE, finding)


def upgrade_available(runs: str, next_start: str) -> ConditionState:
    """runs: the image in use. next_start: the one that a clean restart would bring."""
    if runs == next_start:
        current = found(Reason.IMAGE_CURRENT, f"It runs {runs}, as a restart would.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.FALSE, current)
    waits = found(Reason.NEW_DEFAULT_IMAGE, f"It runs {runs}, and would start with {next_start} now.")
    return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, waits)


EVENT_CONDITIONS = (ConditionType.READY, ConditionType.STALLED, ConditionType.DEGRADED, ConditionType.UPGRADE_AVAILABLE)


def status_changes(before: OwnerStatus, after: OwnerStatus) -> tuple[Action, ...]:
    """Nothing when it reads so already."""
    if after == _with_own_conditions(before, after):
        return ()
    return (WriteStatus(after.to_manifest()), *_events(before, after))


def _with_own_conditions(before: OwnerStatus, after: OwnerStatus) -> OwnerStatus:
    """With the conditions that we write, in our order: the API server has others' beside them, in its own order, and
    writing ours again would change neither."""
    ours = (before.condition(condition.type) for condition in after.conditions)
    return before.model_copy(update={"conditions": tuple(condition for condition in ours if condition is not None)})


def _events(before: OwnerStatus, after: OwnerStatus) -> tuple[Emit, ...]:
    """One for each reason that is new, whichever conditions it moved."""
    emitted: dict[str, Emit] = {}
    for type_ in EVENT_CONDITIONS:
        condition = after.condition(type_)
        if condition is not None and _is_news(before.condition(type_), condition):
            emitted.setdefault(condition.reason, Emit(_event_type(condition), condition.reason, condition.message))
    return tuple(emitted.values())


def _is_news(before: Condition | None, after: Condition) -> bool:
    if after.type != ConditionType.READY and after.status != Truth.TRUE:
        return False
    return before is None or (before.status, before.reason) != (after.status, after.reason)


def _event_type(condition: Condition) -> EventType:
    """A pool that has just been scaled up runs with less than its spec says, and nothing is wrong with that."""
    is_trouble = Reason(condition.reason).progress is Progress.STUCK
    return EventType.WARNING if is_trouble else EventType.NORMAL
