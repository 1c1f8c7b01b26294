"""The health of a session or pool: a state, a reason and a message, all derived from the conditions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tinsmith.cluster.families import Family
from tinsmith.cluster.manifests import Condition, conditions_of

UPGRADE_AVAILABLE = "UpgradeAvailable"


class Health(IntEnum):
    """The states of a family. The most urgent state is first."""

    STUCK = 0
    UNSEEN = 1
    DEGRADED = 2
    MOVING = 3
    RESTING = 4
    WELL = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a family. `message` says what is wrong and what to do."""

    health: Health
    ready: bool
    reason: str
    message: str

    @property
    def headline(self) -> str:
        return "ready" if self.ready and self.health is Health.WELL else f"{self._state}: {self.reason}"

    @property
    def _state(self) -> str:
        return "ready" if self.ready else "not ready"


def judge(family: Family) -> Verdict:
    """Return the health that follows from the most important condition."""
    conditions = conditions_of(family.owner)
    ready = conditions.get("Ready")
    if ready is None:
        return _unseen(family)
    for type_, health in (("Stalled", Health.STUCK), ("Degraded", Health.DEGRADED)):
        found = conditions.get(type_)
        if found is not None and found.holds:
            return _verdict(health, ready.holds, found)
    if ready.holds:
        return _verdict(Health.WELL, True, ready)
    moving = conditions.get("Reconciling")
    health = Health.MOVING if moving is not None and moving.holds else Health.RESTING
    return _verdict(health, False, ready)


def upgrade_hint(family: Family) -> Condition | None:
    """Return the condition UpgradeAvailable if a restart would use another image, or None."""
    found = conditions_of(family.owner).get(UPGRADE_AVAILABLE)
    return found if found is not None and found.holds else None


def is_outdated(family: Family) -> bool:
    """Return whether the status describes an earlier version of the spec."""
    observed = (family.owner.get("status") or {}).get("observedGeneration")
    return observed is not None and bool(observed < family.owner["metadata"].get("generation", 0))


def _verdict(health: Health, ready: bool, condition: Condition) -> Verdict:
    return Verdict(health, ready, condition.reason, condition.message)


def _unseen(family: Family) -> Verdict:
    message = (
        "No operator has said anything about it; see whether Tinsmith's operator runs, and whether it watches the "
        f"namespace {family.namespace}."
    )
    return Verdict(Health.UNSEEN, False, "NotSeen", message)
