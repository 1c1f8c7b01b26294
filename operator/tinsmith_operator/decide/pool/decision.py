"""decide_pool: what is to be done about a pool, beside `decide` for sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from tinsmith_operator.build.budget import build_budget
from tinsmith_operator.build.deployment import build_deployment
from tinsmith_operator.build.policy import build_policy
from tinsmith_operator.build.service import build_service
from tinsmith_operator.decide.actions import Action, Decision
from tinsmith_operator.decide.certificate import keep_certificate, renewal_time
from tinsmith_operator.decide.observed import ObservedPool
from tinsmith_operator.decide.pool.conditions import pool_conditions
from tinsmith_operator.decide.pool.situation import PoolSituation, assess_pool
from tinsmith_operator.decide.pool.status import write_pool_status
from tinsmith_operator.decide.timing import LOOK_FOR_WARNINGS, moments_of, seconds_until_first
from tinsmith_operator.decide.upkeep import keep, still_refused
from tinsmith_operator.installation import Installation


def decide_pool(observed: ObservedPool, installation: Installation, now: datetime) -> Decision:
    """Pure, as `decide` is. A pool that is being deleted needs nothing: its children go with it, by their owner."""
    if observed.pool.is_being_deleted:
        return Decision(())
    situation = assess_pool(observed, installation, now)
    children = _keep_children(situation, installation)
    refusals = still_refused(observed.refusals, children)
    situation = replace(situation, observed=replace(observed, refusals=refusals))
    conditions = pool_conditions(situation, acts=bool(children))
    # The status comes first: what the API server refuses below must not keep it from being said.
    status = write_pool_status(situation, conditions)
    return Decision((*status, *children), seconds_until_first(_moments(situation), now))


def _keep_children(situation: PoolSituation, installation: Installation) -> tuple[Action, ...]:
    """In the order in which they need each other: pods mount the certificate."""
    pool, observed = situation.pool, situation.observed
    return (
        *keep_certificate(observed, pool.uid, situation.now),
        *keep(pool, observed.service, build_service(pool)),
        *keep(pool, observed.policy, build_policy(pool, installation)),
        *keep(pool, observed.workload, build_deployment(pool, situation.template)),
        *keep(pool, observed.budget, build_budget(pool)),
    )


def _moments(situation: PoolSituation) -> Iterator[datetime | None]:
    observed = situation.observed
    if observed.certificate is not None:
        yield renewal_time(observed.certificate)
    for pod in situation.staying_pods:
        yield from moments_of(pod)
    if not situation.rollout.is_done(situation.pool.spec.replicas):
        yield situation.now + LOOK_FOR_WARNINGS
