"""The facts for the decisions and conditions of a pool. The facts are computed once from the pool's observed state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.names import (
    CONFIGURATION_ANNOTATION,
    IMAGE_ANNOTATION,
    INPUTS_ANNOTATION,
    RESTART_REQUEST_ANNOTATION,
)
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.status import IdleState
from tinsmith_operator.build.deployment import build_sampler_template, equivalent_sampler_hashes
from tinsmith_operator.common.diagnosis import Evidence, blocking_reason
from tinsmith_operator.common.drift import has_foreign_content
from tinsmith_operator.common.idleness import Use, assess_idleness, stop_reason, use_of
from tinsmith_operator.common.observed import ObservedPool
from tinsmith_operator.common.ownership import foreign_objects, owned_workload
from tinsmith_operator.common.pod import Pod, read_pod
from tinsmith_operator.common.requests import restart_request
from tinsmith_operator.common.workloads import Workload
from tinsmith_operator.installation import Installation


@dataclass(frozen=True)
class Rollout:
    """The progress of a Deployment.

    - `replicas`, `ready`, `updated`: the numbers of pods that are not terminating.
    - `is_known`: whether the controller has seen this version of the Deployment.
    - `refused`: the message with which the API server refused to create a pod.
    """

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    is_known: bool = False
    refused: str | None = None

    def is_done(self, replicas: int) -> bool:
        return self.is_known and self.replicas == self.ready == self.updated == replicas


def read_rollout(deployment: Workload) -> Rollout:
    status = deployment.manifest.get("status") or {}
    failures = (each for each in status.get("conditions") or () if each["type"] == "ReplicaFailure")
    return Rollout(
        replicas=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        is_known=deployment.is_observed,
        refused=next((each.get("message", "") for each in failures if each["status"] == "True"), None),
    )


@dataclass(frozen=True)
class PoolSituation:
    """The situation of a pool at one moment: the observed state, the desired state, and the differences.

    - `foreign`: a foreign object that has the name of one of the pool's children.
    - `next_template`: the template that pods would have after a restart.
    - `template`: the Deployment's template after this decision.
    - `blocking_reason`: why the pool must have no pods.
    - `staying_pods`: the pods that count as replicas. Terminating and ended pods do not count, because new pods replace
      terminating and ended pods.
    - `failed_pods`: the failed pods, the latest first. A ReplicaSet keeps its failed pods and creates other pods.
    - `use`, `idle`: the use by clients that the pods report, and the idle state for the status.
    - `stop_reason`: why the pool must have no replicas although its spec asks for them.
    """

    observed: ObservedPool
    installation: Installation
    now: datetime
    foreign: Manifest | None
    next_template: Manifest
    template: Manifest
    rollout: Rollout
    blocking_reason: Finding | None
    evidence: Evidence
    staying_pods: tuple[Pod, ...]
    failed_pods: tuple[Pod, ...]
    use: Use | None
    idle: IdleState | None
    stop_reason: Finding | None

    @property
    def pool(self) -> SamplerPool:
        return self.observed.pool

    @property
    def replicas(self) -> int:
        """The number of replicas that the spec requests, unless the pool is idle or the policy allows none."""
        return self.pool.spec.replicas if self.blocking_reason is None and self.stop_reason is None else 0


def assess_pool(observed: ObservedPool, installation: Installation, now: datetime) -> PoolSituation:
    live, foreign = owned_workload(observed), next(foreign_objects(observed), None)
    restart = restart_request(observed.pool, live)
    built = build_sampler_template(observed.pool, installation, restart)
    template, rollout, blocked = built, Rollout(), blocking_reason(observed, installation)
    pods = tuple(read_pod(manifest, installation.policy) for manifest in observed.pods)
    staying = tuple(pod for pod in pods if not pod.is_terminating and not pod.has_ended)
    if live is not None:
        # If the Deployment must be written, its progress describes another template.
        pull_secrets = live.template["spec"].get("imagePullSecrets") or ()
        same = equivalent_sampler_hashes(observed.pool, installation, restart, pull_secrets)
        must_be_written = blocked is None and _must_be_written(live, built, same, staying)
        rollout = replace(read_rollout(live), is_known=False) if must_be_written else read_rollout(live)
        template = built if must_be_written else live.template
    use = _use_of(observed, staying)
    idle = assess_idleness(observed.pool, use, now)
    failed = [pod for pod in pods if pod.has_failed and not pod.is_terminating]
    failed.sort(key=lambda pod: (str(pod.manifest["metadata"].get("creationTimestamp")), pod.name), reverse=True)
    return PoolSituation(
        observed=observed,
        installation=installation,
        now=now,
        foreign=foreign,
        next_template=built,
        template=template,
        rollout=rollout,
        blocking_reason=blocked,
        evidence=Evidence(observed.warnings, now),
        staying_pods=staying,
        failed_pods=tuple(failed),
        use=use,
        idle=idle,
        stop_reason=stop_reason(observed.pool, idle, now),
    )


def _use_of(observed: ObservedPool, pods: Sequence[Pod]) -> Use | None:
    """Return the use of the pool, or None while the report of a pod is missing. A pod that is not ready has no use."""
    reports = [observed.reports.get(pod.uid) for pod in pods if pod.is_ready]
    present = [report for report in reports if report is not None]
    return use_of(present) if len(present) == len(reports) else None


def image_of(template: Manifest) -> str:
    return str(_annotations(template).get(IMAGE_ANNOTATION, ""))


def restart_of(template: Manifest) -> str | None:
    """Return the restart request that pods with this template carry out."""
    return _annotations(template).get(RESTART_REQUEST_ANNOTATION)


def _must_be_written(deployment: Workload, built: Manifest, same: frozenset[str], pods: tuple[Pod, ...]) -> bool:
    """Return whether the template in the Deployment must be replaced.

    A newer operator, a new default image, or another way to pull the same image does not replace the template. The
    template is replaced if other managers have changed the template, or if the configuration annotation is missing.

    `same` contains the hashes of templates that run the same containers.
    """
    live, desired = _annotations(deployment.template).get(INPUTS_ANNOTATION), _annotations(built)[INPUTS_ANNOTATION]
    differs = live != desired and (live not in same or any(pod.cannot_pull for pod in pods))
    is_sealed = CONFIGURATION_ANNOTATION in _annotations(deployment.manifest)
    return differs or not is_sealed or has_foreign_content(deployment.manifest)


def _annotations(manifest: Manifest) -> dict[str, str]:
    return (manifest.get("metadata") or {}).get("annotations") or {}
