"""Conditions: their types, and how they move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import Condition

LONGEST_MESSAGE = 2048


class ConditionType(StrEnum):
    meaning: str

    def __new__(cls, value: str, meaning: str) -> ConditionType:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    READY = "Ready", "Clients can train and sample on this session, or sample from this pool, now."
    RECONCILING = "Reconciling", "The operator or the cluster is at work; waiting is enough."
    STALLED = "Stalled", "It goes no further until a person does what the message says."
    SLOTS_AVAILABLE = "SlotsAvailable", "Another adapter fits on the worker. Of sessions alone."
    DEGRADED = "Degraded", "It is threatened or runs otherwise than the spec says, whether it is ready or not."
    UPGRADE_AVAILABLE = (
        "UpgradeAvailable",
        "A restart would bring another image: the default of the installation has changed.",
    )


class Truth(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Finding:
    """What is the matter, in one sentence that ends with the cure where there is one."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ConditionState:
    """A condition as it should read now; when it began to is not its business.

    begins: but that something new begins with it, although its status may be what it was.
    """

    type: ConditionType
    truth: Truth
    finding: Finding
    begins: bool = False


def move_conditions(
    before: Iterable[Condition], wanted: Iterable[ConditionState], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The wanted conditions; a transition time moves only when the status does, or something begins."""
    old = {condition.type: condition for condition in before}
    return tuple(_move(old.get(state.type), state, generation, now) for state in wanted)


def _move(old: Condition | None, state: ConditionState, generation: int, now: datetime) -> Condition:
    unmoved = old is not None and old.status == state.truth and not state.begins
    return Condition(
        type=state.type,
        status=state.truth,
        reason=state.finding.reason,
        message=_shortened(state.finding.message),
        last_transition_time=old.last_transition_time if old is not None and unmoved else now.replace(microsecond=0),
        observed_generation=generation,
    )


def _shortened(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
