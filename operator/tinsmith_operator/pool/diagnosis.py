"""The reasons why a pool differs from its spec. Each reason comes with a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.common import diagnosis as common
from tinsmith_operator.common.diagnosis import (
    WARNING_LIFE,
    found,
    why_pod_failed,
    why_pod_is_not_ready,
    why_pods_are_missing,
)
from tinsmith_operator.common.pod import Pod, node_is_silent
from tinsmith_operator.pool.situation import PoolSituation


@dataclass(frozen=True)
class PoolDiagnosis:
    """The findings about a pool.

    - `is_ready`: clients can sample. One ready replica is enough; the condition Degraded reports missing replicas.
    - `trouble`: why the pool is not ready.
    - `unfinished`: why the Deployment differs from the spec; None: the Deployment matches the spec.
    """

    is_ready: bool
    trouble: Finding | None
    unfinished: Finding | None
    refusal: Finding | None
    ca_problem: Finding | None


def diagnose_pool(situation: PoolSituation, refusal: Finding | None) -> PoolDiagnosis:
    observed, rollout = situation.observed, situation.rollout
    conflict = common.name_conflict(situation.pool, situation.foreign)
    ca_problem = common.ca_problem(observed)
    certificate = common.missing_certificate(observed)
    unfinished = None if rollout.is_done(situation.replicas) else _why_unfinished(situation)
    is_ready = situation.replicas > 0 and rollout.ready > 0 and conflict is None
    trouble = (
        None
        if is_ready
        else situation.blocking_reason or conflict or refusal or _scaled_to_zero(situation) or certificate or unfinished
    )
    return PoolDiagnosis(is_ready, trouble, unfinished, refusal, ca_problem)


def _why_unfinished(situation: PoolSituation) -> Finding:
    """Return the most serious finding about the replicas."""
    if situation.observed.workload is None:
        return found(Reason.CREATING_OBJECTS, "The Deployment is being created.")
    worst = min(_replica_findings(situation), key=_severity, default=None)
    counts = _counts(situation)
    if worst is None:
        return found(Reason.ROLLING_OUT, f"{counts}.")
    return Finding(worst.reason, f"{counts}; {worst.message}")


def _scaled_to_zero(situation: PoolSituation) -> Finding | None:
    rollout = situation.rollout
    workload = situation.observed.workload
    if situation.replicas > 0 or workload is None:
        return None
    # The status of a Deployment that still asks for replicas may be older than its first pod.
    if workload["spec"]["replicas"] > 0 or not rollout.is_done(0):
        return found(Reason.ROLLING_OUT, "The last replicas finish their requests and stop.")
    return situation.stop_reason or found(Reason.SCALED_TO_ZERO, "No replica is wanted, and none is left.")


def _counts(situation: PoolSituation) -> str:
    replicas, rollout = situation.replicas, situation.rollout
    return f"{rollout.ready} of {replicas} replicas are ready, and {rollout.updated} are up to date"


def _replica_findings(situation: PoolSituation) -> Iterator[Finding]:
    if situation.rollout.refused is not None:
        yield why_pods_are_missing(situation.rollout.refused)
    for pod in situation.staying_pods:
        if not pod.is_ready:
            finding = _lost_node(situation, pod) or why_pod_is_not_ready(pod, situation.evidence)
            yield Finding(finding.reason, f"pod {pod.name}: {finding.message}")
    yield from _latest_failure(situation)


def _latest_failure(situation: PoolSituation) -> Iterator[Finding]:
    """Yield a finding if the latest pod was not admitted by its node.

    A pod that the node did not admit is replaced, but the next pod may fail in the same way.
    """
    latest = next(iter(situation.failed_pods), None)
    if latest is None or latest.created_at is None or situation.now - latest.created_at > WARNING_LIFE:
        return
    failure = why_pod_failed(latest, is_one_of_many=True)
    if failure.reason is Reason.NODE_REFUSES_POD:
        yield failure


def _lost_node(situation: PoolSituation, pod: Pod) -> Finding | None:
    if not node_is_silent(pod, situation.now):
        return None
    return found(Reason.REPLICA_NODE_UNREACHABLE, f"Node {pod.node_name} does not answer.")


def _severity(finding: Finding) -> bool:
    """Return a sort key. Findings that need a person to act come first."""
    return finding.reason.progress is not Progress.STUCK
