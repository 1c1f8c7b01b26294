"""What follows from what is there around a pool, worked out once for all decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from tinsmith_operator.build.deployment import build_sampler_template
from tinsmith_operator.decide.evidence import Evidence
from tinsmith_operator.decide.managed_fields import others_hold_content
from tinsmith_operator.decide.observed import ObservedPool
from tinsmith_operator.decide.ownership import own_workload
from tinsmith_operator.decide.pod import Pod
from tinsmith_operator.decide.pool.rollout import Rollout, read_rollout
from tinsmith_operator.decide.requests import restart_request
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import (
    CONFIGURATION_ANNOTATION,
    IMAGE_ANNOTATION,
    INPUTS_ANNOTATION,
    RESTART_REQUEST_ANNOTATION,
)
from tinsmith_operator.model.pool import SamplerPool


@dataclass(frozen=True)
class PoolSituation:
    """next_template: of pods that start from now on, if anything starts them anew. template: of the Deployment."""

    observed: ObservedPool
    now: datetime
    next_template: Manifest
    template: Manifest
    rollout: Rollout

    @property
    def pool(self) -> SamplerPool:
        return self.observed.pool

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.observed.warnings, self.now)

    @property
    def staying_pods(self) -> tuple[Pod, ...]:
        """Those that count: one that is on its way out, or was evicted, has been replaced."""
        pods = (Pod(manifest) for manifest in self.observed.pods)
        return tuple(pod for pod in pods if not pod.is_terminating and not pod.has_ended)


def assess_pool(observed: ObservedPool, installation: Installation, now: datetime) -> PoolSituation:
    live = own_workload(observed)
    built = build_sampler_template(observed.pool, installation, restart_request(observed))
    rollout = read_rollout(live)
    if live is None or _must_be_written(live, built):
        # Whatever its controller has come to, it was for another template.
        return PoolSituation(observed, now, built, built, replace(rollout, is_known=False))
    return PoolSituation(observed, now, built, live["spec"]["template"], rollout)


def image_of(template: Manifest) -> str:
    return str(_annotations(template).get(IMAGE_ANNOTATION, ""))


def restart_of(template: Manifest) -> str | None:
    """The request to start anew that its pods are the answer to."""
    return _annotations(template).get(RESTART_REQUEST_ANNOTATION)


def _must_be_written(deployment: Manifest, built: Manifest) -> bool:
    """The live template stays while it says the same: what another operator, or another default image, would add to it
    rolls no pods. One that others have written into, or whose seal is broken, does not say what it should."""
    live = deployment["spec"]["template"]
    said, wanted = _annotations(live).get(INPUTS_ANNOTATION), _annotations(built)[INPUTS_ANNOTATION]
    is_sealed = CONFIGURATION_ANNOTATION in _annotations(deployment)
    return said != wanted or not is_sealed or others_hold_content(deployment)


def _annotations(manifest: Manifest) -> dict[str, str]:
    return (manifest.get("metadata") or {}).get("annotations") or {}
