"""The conditions of a session as they should read now."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import AdapterUsage
from tinsmith_operator.common.conditions import AS_WANTED, BRINGING, standard_conditions, upgrade_available
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.session.diagnosis import Diagnosis
from tinsmith_operator.session.situation import Situation


def wanted_conditions(situation: Situation, diagnosis: Diagnosis, *, acts: bool) -> tuple[ConditionState, ...]:
    """acts: whether this decision changes an object, so that the next one finds something else."""
    serves = found(Reason.WORKER_READY, f"The worker serves {situation.session.spec.model.name}.")
    readiness = serves if diagnosis.is_ready else diagnosis.trouble or serves
    progress = _progress_of_a_ready_session(diagnosis, acts=acts) if diagnosis.is_ready else readiness
    standard = standard_conditions(readiness, progress, _degradation(diagnosis))
    return (*standard, _slots(situation.adapters if diagnosis.is_ready else None), upgrade_state(situation))


def upgrade_state(situation: Situation) -> ConditionState:
    plan = situation.image_plan
    return upgrade_available(plan.pins.image.reference, plan.available or plan.pins.image.reference)


def _progress_of_a_ready_session(diagnosis: Diagnosis, *, acts: bool) -> Finding:
    """It may be ready and yet not what the spec asks for."""
    trouble = diagnosis.refusal or diagnosis.refused_image or diagnosis.trouble
    return trouble or (BRINGING if acts else AS_WANTED)


def _degradation(diagnosis: Diagnosis) -> Finding | None:
    return (
        diagnosis.lost_node
        or diagnosis.terminating_claim
        or diagnosis.full_volume
        or diagnosis.refused_image
        or _volume_on_lost_node(diagnosis)
        or diagnosis.ca_problem
    )


def _volume_on_lost_node(diagnosis: Diagnosis) -> Finding | None:
    trouble = diagnosis.trouble
    if diagnosis.is_ready or trouble is None or trouble.reason is not Reason.VOLUME_ON_LOST_NODE:
        return None
    return trouble


def _slots(adapters: AdapterUsage | None) -> ConditionState:
    if adapters is None:
        unknown = found(Reason.NOT_REPORTED, "The worker has not said how many slots are used.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, unknown)
    if adapters.used < adapters.capacity:
        free = found(Reason.SLOTS_FREE, f"{adapters.capacity - adapters.used} of {adapters.capacity} slots are free.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.TRUE, free)
    used = found(Reason.ALL_SLOTS_USED, f"All {adapters.capacity} slots are used.")
    return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.FALSE, used)
