"""The conditions of a pool as they should read now."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, Finding
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.common.conditions import AS_WANTED, BRINGING, standard_conditions, upgrade_available
from tinsmith_operator.common.diagnosis import ca_problem, found, refusal
from tinsmith_operator.pool.diagnosis import names_taken, unfinished, why_not_ready
from tinsmith_operator.pool.situation import PoolSituation, image_of


def pool_conditions(situation: PoolSituation, *, acts: bool) -> tuple[ConditionState, ...]:
    """acts: whether this decision changes an object, so that the next one finds something else."""
    ready = is_ready(situation)
    finding = _ready_words(situation) if ready else why_not_ready(situation)
    progress = _progress_of_a_ready_pool(situation, acts=acts) if ready else finding
    degradation = _degradation(situation, progress) if ready else ca_problem(situation.observed)
    upgrade = upgrade_available(image_of(situation.template), image_of(situation.next_template))
    return (*standard_conditions(finding, progress, degradation), upgrade)


def is_ready(situation: PoolSituation) -> bool:
    """Somebody can sample: one replica is enough, and what is missing to the rest is said by Degraded."""
    return situation.pool.spec.replicas > 0 and situation.rollout.ready > 0 and names_taken(situation) is None


def _ready_words(situation: PoolSituation) -> Finding:
    """Without numbers, which move while nothing else does."""
    return found(Reason.REPLICAS_READY, f"Replicas sample from {situation.pool.spec.model.name}.")


def _progress_of_a_ready_pool(situation: PoolSituation, *, acts: bool) -> Finding:
    if refused := refusal(situation.observed):
        return refused
    if situation.rollout.is_done(situation.pool.spec.replicas):
        return BRINGING if acts else AS_WANTED
    return unfinished(situation)


def _degradation(situation: PoolSituation, progress: Finding) -> Finding | None:
    """Fewer replicas than wanted, or others than wanted for as long as nobody helps."""
    if situation.rollout.ready < situation.pool.spec.replicas:
        return unfinished(situation)
    return progress if progress.reason.progress is Progress.STUCK else ca_problem(situation.observed)
