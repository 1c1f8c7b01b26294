"""The conditions of a session as they should read now."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, ConditionType, Finding, Truth
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import AdapterUsage
from tinsmith_operator.common.conditions import AS_WANTED, BRINGING, standard_conditions, upgrade_available
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.session.diagnosis import Diagnosis
from tinsmith_operator.session.image_pull import why_not_pulled
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.upgrade import runs


def wanted_conditions(situation: Situation, diagnosis: Diagnosis, *, acts: bool) -> tuple[ConditionState, ...]:
    """acts: whether this decision changes an object, so that the next one finds something else."""
    serves = found(Reason.WORKER_READY, f"The worker serves {situation.session.spec.model.name}.")
    readiness = serves if diagnosis.is_ready else diagnosis.trouble or serves
    progress = _progress_of_a_ready_session(diagnosis, acts=acts) if diagnosis.is_ready else readiness
    standard = standard_conditions(readiness, progress, _degradation(diagnosis))
    takes = situation.observed.has_turn and wants_turn(situation, diagnosis)
    upgrade = taking_turn() if takes else upgrade_state(situation)
    return (*standard, _slots(situation.adapters if diagnosis.is_ready else None), upgrade)


def wants_turn(situation: Situation, diagnosis: Diagnosis) -> bool:
    """Whether it would restart for what nobody asked of it; and once its turn has come, until it serves again."""
    if situation.session.spec.suspend or situation.bar is not None:
        return False
    is_on_its_way = diagnosis.trouble is not None or diagnosis.image_pull is not None
    return situation.upgrade_waits or (situation.observed.has_turn and is_on_its_way)


def upgrade_state(situation: Situation) -> ConditionState:
    plan = situation.image_plan
    if (pull := why_not_pulled(situation)) is not None:
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, pull)
    if situation.pod is None or not runs(situation.pod, plan.pins.image) or plan.stop_first:
        starts = found(Reason.IMAGE_CURRENT, f"It starts with {plan.requested}.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.FALSE, starts)
    if plan.available is None and situation.settings_differ:
        settings = found(Reason.NEW_SETTINGS, "It runs with what the installation said of pods before.")
        return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, settings)
    return upgrade_available(plan.pins.image.reference, plan.available or plan.pins.image.reference)


def taking_turn() -> ConditionState:
    """Also read back, by an operator that takes over: whose turn it is stands nowhere else."""
    turn = found(
        Reason.TAKING_ITS_TURN, "Its turn has come: it restarts, and the next one waits until it serves again."
    )
    return ConditionState(ConditionType.UPGRADE_AVAILABLE, Truth.TRUE, turn)


def _progress_of_a_ready_session(diagnosis: Diagnosis, *, acts: bool) -> Finding:
    """It may be ready and yet not what the spec asks for."""
    trouble = diagnosis.refusal or diagnosis.refused_image or diagnosis.image_pull or diagnosis.trouble
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
        unknown = found(Reason.NOT_REPORTED, "The worker has not said how many places are taken.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.UNKNOWN, unknown)
    if adapters.used < adapters.capacity:
        free = found(Reason.SLOTS_FREE, f"{adapters.capacity - adapters.used} of {adapters.capacity} places are free.")
        return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.TRUE, free)
    used = found(Reason.ALL_SLOTS_USED, f"All {adapters.capacity} places are taken.")
    return ConditionState(ConditionType.SLOTS_AVAILABLE, Truth.FALSE, used)
