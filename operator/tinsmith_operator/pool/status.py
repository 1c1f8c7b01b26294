"""The status of a pool, with its conditions."""

from __future__ import annotations

from tinsmith_operator.api.conditions import ConditionState, Finding, move_conditions
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.api.status import PoolRequests, SamplerPoolStatus
from tinsmith_operator.build.metadata import selector_labels
from tinsmith_operator.common.actions import Action
from tinsmith_operator.common.conditions import (
    AS_WANTED,
    BRINGING,
    PAUSED,
    standard_conditions,
    status_changes,
    upgrade_available,
)
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.requests import answered_restart, restart_events
from tinsmith_operator.pool.diagnosis import PoolDiagnosis
from tinsmith_operator.pool.situation import PoolSituation, image_of, restart_of


def write_pool_status(situation: PoolSituation, conditions: tuple[ConditionState, ...]) -> tuple[Action, ...]:
    """Return the actions that write the status and the Events. If the status is up to date, return no action."""
    before, after = situation.pool.status, build_pool_status(situation, conditions)
    changes = status_changes(before, after)
    return (*changes, *restart_events(_restart(before), _restart(after), "Every replica was")) if changes else ()


def build_pool_status(situation: PoolSituation, conditions: tuple[ConditionState, ...]) -> SamplerPoolStatus:
    pool, rollout = situation.pool, situation.rollout
    before = pool.status.conditions
    return SamplerPoolStatus(
        observed_generation=pool.generation,
        conditions=move_conditions(before, conditions, generation=pool.generation, now=situation.now),
        certificate_expiry_time=situation.observed.certificate_expiry_time,
        idle=situation.idle,
        replicas=rollout.replicas,
        ready_replicas=rollout.ready,
        updated_replicas=rollout.updated,
        selector=",".join(f"{label}={value}" for label, value in selector_labels(pool).items()),
        image=image_of(situation.template),
        requests=_requests(situation),
    )


def _requests(situation: PoolSituation) -> PoolRequests | None:
    """Return the requests that have been carried out.

    A restart is complete when every replica has the template of the restart.
    """
    pool = situation.pool
    is_done = situation.rollout.is_done(situation.replicas)
    running_for = restart_of(situation.template) if is_done else None
    answered = answered_restart(pool, _restart(pool.status), running_for)
    return PoolRequests(restart=answered) if answered is not None else None


def _restart(status: SamplerPoolStatus) -> str | None:
    return status.requests.restart if status.requests is not None else None


def pool_conditions(situation: PoolSituation, diagnosis: PoolDiagnosis, *, acts: bool) -> tuple[ConditionState, ...]:
    """Return the conditions of a pool. `acts` says whether this decision changes an object."""
    # The message has no numbers, because they would change it too often.
    samples = found(Reason.REPLICAS_READY, f"Replicas serve {situation.pool.spec.model.name}.")
    readiness = diagnosis.trouble or samples
    progress = _progress_of_a_ready_pool(diagnosis, acts=acts) if diagnosis.is_ready else readiness
    if situation.pool.is_paused:
        progress = PAUSED
    standard = standard_conditions(readiness, progress, _degradation(situation, diagnosis, progress))
    return (*standard, upgrade_available(image_of(situation.template), image_of(situation.next_template)))


def _progress_of_a_ready_pool(diagnosis: PoolDiagnosis, *, acts: bool) -> Finding:
    return diagnosis.refusal or diagnosis.unfinished or (BRINGING if acts else AS_WANTED)


def _degradation(situation: PoolSituation, diagnosis: PoolDiagnosis, progress: Finding) -> Finding | None:
    """Return why a ready pool is degraded: replicas are missing, or a person must act."""
    if not diagnosis.is_ready:
        return diagnosis.ca_problem
    if situation.rollout.ready < situation.replicas:
        return diagnosis.unfinished
    return progress if progress.reason.progress is Progress.STUCK else diagnosis.ca_problem
