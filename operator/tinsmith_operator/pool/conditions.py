"""The conditions of a pool as they should read now."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, Finding
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.common.conditions import AS_WANTED, BRINGING, standard_conditions, upgrade_available
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.pool.diagnosis import PoolDiagnosis
from tinsmith_operator.pool.situation import PoolSituation, image_of


def pool_conditions(situation: PoolSituation, diagnosis: PoolDiagnosis, *, acts: bool) -> tuple[ConditionState, ...]:
    """acts: whether this decision changes an object, so that the next one finds something else."""
    # Without numbers, which move while nothing else does.
    samples = found(Reason.REPLICAS_READY, f"Replicas sample from {situation.pool.spec.model.name}.")
    readiness = diagnosis.trouble or samples
    progress = _progress_of_a_ready_pool(diagnosis, acts=acts) if diagnosis.is_ready else readiness
    standard = standard_conditions(readiness, progress, _degradation(situation, diagnosis, progress))
    return (*standard, upgrade_available(image_of(situation.template), image_of(situation.next_template)))


def _progress_of_a_ready_pool(diagnosis: PoolDiagnosis, *, acts: bool) -> Finding:
    return diagnosis.refusal or diagnosis.unfinished or (BRINGING if acts else AS_WANTED)


def _degradation(situation: PoolSituation, diagnosis: PoolDiagnosis, progress: Finding) -> Finding | None:
    """Fewer replicas than wanted, or others than wanted for as long as nobody helps."""
    if not diagnosis.is_ready:
        return diagnosis.ca_problem
    if situation.rollout.ready < situation.pool.spec.replicas:
        return diagnosis.unfinished
    return progress if progress.reason.progress is Progress.STUCK else diagnosis.ca_problem
