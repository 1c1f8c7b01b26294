"""The types of conditions, and the transitions of conditions."""

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

    READY = "Ready", "Clients can train and sample on this session, or sample from this pool."
    RECONCILING = "Reconciling", "The operator or the cluster is working on it. Waiting is enough."
    STALLED = "Stalled", "Nothing continues until a person does what the message says."
    SLOTS_AVAILABLE = "SlotsAvailable", "The worker has room for another adapter. Only sessions have this condition."
    DEGRADED = "Degraded", "It is at risk, or differs from its spec, whether it is ready or not."
    UPGRADE_AVAILABLE = (
        "UpgradeAvailable",
        "A restart would update it to the installation's default image or settings.",
    )


class Truth(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Finding:
    """A reason, and a message that says what happened. If a remedy exists, the message ends with the remedy."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ConditionState:
    """A desired condition, without its transition time.

    If `begins` is true, the condition gets a new transition time even if the status of the condition does not change.
    """

    type: ConditionType
    truth: Truth
    finding: Finding
    begins: bool = False


def move_conditions(
    before: Iterable[Condition], states: Iterable[ConditionState], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the desired conditions. The transition time changes if the status changes, or if `begins` is true."""
    old = {condition.type: condition for condition in before}
    return tuple(_move(old.get(state.type), state, generation, now) for state in states)


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
