"""What is written, and which Events are emitted, when a status changes."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionType, Truth
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.api.status import Condition, OwnerStatus
from tinsmith_operator.common.actions import Action, Emit, EventType, WriteStatus

EVENT_CONDITIONS = (ConditionType.READY, ConditionType.STALLED, ConditionType.DEGRADED, ConditionType.UPGRADE_AVAILABLE)


def status_changes(before: OwnerStatus, after: OwnerStatus) -> tuple[Action, ...]:
    """Nothing when it reads so already."""
    if after == _of_ours(before, after):
        return ()
    return (WriteStatus(after.to_manifest()), *_events(before, after))


def _of_ours(before: OwnerStatus, after: OwnerStatus) -> OwnerStatus:
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
