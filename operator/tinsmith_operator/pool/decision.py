"""The decision about a SamplerPool. The decision turns the observed state into actions that reconcile the pool."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from tinsmith_operator.api.names import SAMPLER_DNS_NAME
from tinsmith_operator.build.deployment import build_budget, build_deployment
from tinsmith_operator.build.network import build_pool_policy, build_service
from tinsmith_operator.common.actions import Action, Annotate, Decision, Delete
from tinsmith_operator.common.certificate import certificate_is_foreign, ensure_certificate, renewal_time
from tinsmith_operator.common.conditions import first_status_time, may_wait
from tinsmith_operator.common.diagnosis import refusal
from tinsmith_operator.common.drift import ensure_child, still_refused
from tinsmith_operator.common.idleness import delete_idle, idle_moments
from tinsmith_operator.common.observed import ObservedPool
from tinsmith_operator.common.ownership import owned_workload
from tinsmith_operator.common.requeue import LOOK_FOR_WARNINGS, annotate_for_retry, requeue_after, requeue_times_of
from tinsmith_operator.installation import Installation
from tinsmith_operator.pool.diagnosis import diagnose_pool
from tinsmith_operator.pool.situation import PoolSituation, assess_pool
from tinsmith_operator.pool.status import pool_conditions, write_pool_status

MOST_FAILED_PODS = 3
"""The number of failed pods that are kept."""


def decide_pool(observed: ObservedPool, installation: Installation, now: datetime) -> Decision:
    """Return what to do about one pool now. The function is pure.

    Kubernetes deletes the children of a pool together with the pool.
    """
    if observed.pool.is_being_deleted:
        return Decision(())
    situation = assess_pool(observed, installation, now)
    if situation.pool.is_paused:
        conditions = pool_conditions(situation, diagnose_pool(situation, None), acts=False)
        return Decision(write_pool_status(situation, conditions))
    if deletion := delete_idle(situation.pool, situation.idle, situation.use, now):
        return Decision(deletion)
    children = _ensure_children(situation, installation)
    diagnosis = diagnose_pool(situation, refusal(still_refused(observed.refusals, children)))
    conditions = pool_conditions(situation, diagnosis, acts=bool(children))
    # The status comes first, so that it is written even if the API server refuses a later action.
    status_time = None
    if diagnosis.unfinished is not None:
        status_time = first_status_time(observed, owned_workload(observed), conditions, now)
    waits = status_time is not None or (children and may_wait(observed, conditions))
    status = () if waits else write_pool_status(situation, conditions)
    actions = (*status, *(children or _retry_refused_pods(situation)), *_remove_failed_pods(situation))
    return Decision(actions, requeue_after((status_time, *_moments(situation)), now))


def _ensure_children(situation: PoolSituation, installation: Installation) -> tuple[Action, ...]:
    """Return the actions on the children.

    The order follows dependencies: for example, the certificate comes before the pods that mount the certificate.
    """
    pool, observed = situation.pool, situation.observed
    deployment = build_deployment(pool, situation.replicas, situation.template)
    if situation.blocking_reason is not None:
        # Keep the old template, because a spec that the policy forbids is not written.
        return ensure_child(observed, observed.workload, deployment) if observed.workload is not None else ()
    if observed.workload is None and certificate_is_foreign(observed):
        return ()
    return (
        *ensure_certificate(observed, pool.uid, situation.now, SAMPLER_DNS_NAME),
        *ensure_child(observed, observed.service, build_service(pool)),
        *ensure_child(observed, observed.policy, build_pool_policy(pool, installation)),
        *ensure_child(observed, observed.workload, deployment),
        *ensure_child(observed, observed.budget, build_budget(pool)),
    )


def _retry_refused_pods(situation: PoolSituation) -> tuple[Annotate, ...]:
    """Make the controller create refused pods again.

    The Deployment copies its annotations to its ReplicaSet, and the controller of the ReplicaSet creates the pods.
    """
    live = owned_workload(situation.observed)
    if live is None or situation.rollout.refused is None:
        return ()
    return annotate_for_retry(live, situation.pool.status, situation.now)


def _remove_failed_pods(situation: PoolSituation) -> tuple[Delete, ...]:
    """Delete all failed pods except the latest ones, which are kept to show the cause of the failures.

    A node can reject a pod every second.
    """
    why = "it has failed, and later pods show why"
    return tuple(Delete("Pod", pod.name, pod.uid, why) for pod in situation.failed_pods[MOST_FAILED_PODS:])


def _moments(situation: PoolSituation) -> Iterator[datetime | None]:
    observed = situation.observed
    if observed.certificate is not None:
        yield renewal_time(observed.certificate)
    for pod in situation.staying_pods:
        yield from requeue_times_of(pod)
    yield from idle_moments(situation.pool, situation.idle)
    if not situation.rollout.is_done(situation.replicas):
        yield situation.now + LOOK_FOR_WARNINGS
