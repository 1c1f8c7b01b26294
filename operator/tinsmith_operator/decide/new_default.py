"""Whether another image waits for the next restart: a default that has changed restarts nothing by itself."""

from __future__ import annotations

from tinsmith_operator.decide.wording import found
from tinsmith_operator.model.conditions import ConditionState, ConditionType, Truth
from tinsmith_operator.model.reasons import Reason


def upgrade_available(runs: str, next_start: str) -> ConditionState:
    """runs: the image in use. next_start: the one that a clean restart would bring."""
    if runs == next_start:
        current = found(Reason.IMAGE_CURRENT, f"It runs {runs}, as a restart would.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.FALSE, current)
    waits = found(Reason.NEW_DEFAULT_IMAGE, f"It runs {runs}, and would start with {next_start} now.")
    return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, waits)
