"""The conditions as they should read now."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import AdapterUsage
from tinsmith_operator.common.conditions import AS_WANTED, BRINGING, standard_conditions, upgrade_available
from tinsmith_operator.common.diagnosis import ca_problem, found, refusal
from tinsmith_operator.session.diagnosis import lost_node, names_taken, terminating_claim, why_not_ready
from tinsmith_operator.session.situation import Situation


def wanted_conditions(situation: Situation, adapters: AdapterUsage | None, *, acts: bool) -> tuple[ConditionState, ...]:
    """acts: whether this decision changes an object, so that the next one finds something else."""
    ready = is_ready(situation)
    finding = _ready_words(situation) if ready else why_not_ready(situation)
    progress = _progress_of_a_ready_session(situation, acts=acts) if ready else finding
    standard = standard_conditions(finding, progress, _degradation(situation))
    return (*standard, _slots(adapters if ready else None), upgrade_state(situation))


def upgrade_state(situation: Situation) -> ConditionState:
    plan = situation.image_plan
    return upgrade_available(plan.pins.image.reference, plan.available or plan.pins.image.reference)


def is_ready(situation: Situation) -> bool:
    """The worker serves, and it is ours alone that answers under its name, from behind its policy and on its volume."""
    if situation.observed.claim_holder is not None:
        return False
    return situation.pod is not None and situation.pod.is_ready and names_taken(situation) is None


def _ready_words(situation: Situation) -> Finding:
    return found(Reason.WORKER_READY, f"The worker serves {situation.session.spec.model.name}.")


def _progress_of_a_ready_session(situation: Situation, *, acts: bool) -> Finding:
    """It may be ready and yet not what the spec asks for."""
    if trouble := refusal(situation.observed) or _refused_image(situation):
        return trouble
    if situation.session.spec.suspend or situation.image_plan.stop_first or situation.must_restart or situation.is_hung:
        return why_not_ready(situation)
    return BRINGING if acts else AS_WANTED


def _refused_image(situation: Situation) -> Finding | None:
    plan = situation.image_plan
    if not plan.gave_up:
        return None
    return found(Reason.IMAGE_REFUSED, f"{plan.requested} refused the volume twice; {plan.pins.image.reference} runs.")


def _degradation(situation: Situation) -> Finding | None:
    return (
        lost_node(situation)
        or terminating_claim(situation)
        or _refused_image(situation)
        or _volume_on_lost_node(situation)
        or ca_problem(situation.observed)
    )


def _volume_on_lost_node(situation: Situation) -> Finding | None:
    if is_ready(situation):
        return None
    finding = why_not_ready(situation)
    return finding if finding.reason is Reason.VOLUME_ON_LOST_NODE else None


def _slots(adapters: AdapterUsage | None) -> ConditionState:
    if adapters is None:
        unknown = found(Reason.NOT_REPORTED, "The worker has not said how many slots are used.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, unknown)
    if adapters.used < adapters.capacity:
        free = found(Reason.SLOTS_FREE, f"{adapters.capacity - adapters.used} of {adapters.capacity} slots are free.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.TRUE, free)
    used = found(Reason.ALL_SLOTS_USED, f"All {adapters.capacity} slots are used.")
    return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.FALSE, used)
