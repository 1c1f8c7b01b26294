"""What follows from what is there, worked out once for all decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.session import TrainingSession
from tinsmith_operator.build.worker import WorkerPlan, inputs_hash
from tinsmith_operator.common.observed import Evidence, Observed, WorkerReport
from tinsmith_operator.common.ownership import claim_is_ours, is_of_own_workload, pod_is_ours
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.requests import restart_request
from tinsmith_operator.installation import Installation
from tinsmith_operator.session.conversion_job import awaits_conversion
from tinsmith_operator.session.upgrade import ImagePlan, plan_image


@dataclass(frozen=True)
class Situation:
    """What the decisions of one moment share.

    pod: the worker's. members: the others of a session of several pods.
    claim: the one with the journal, if it may be used.
    worker: how it should be started; None until there is a claim.
    awaits_conversion: whether it starts as soon as its model is converted, and not before.
    """

    observed: Observed
    installation: Installation
    now: datetime
    image_plan: ImagePlan
    pod: Pod | None
    members: tuple[Pod, ...]
    claim: Manifest | None
    worker: WorkerPlan | None
    awaits_conversion: bool

    @property
    def session(self) -> TrainingSession:
        return self.observed.session

    @property
    def converters(self) -> tuple[Pod, ...]:
        """The pods that convert its model or have done so, the latest last."""
        pods = sorted(self.observed.converters, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        return tuple(Pod(pod) for pod in pods)

    @property
    def evidence(self) -> Evidence:
        claim_uid = self.claim["metadata"]["uid"] if self.claim is not None else None
        return Evidence(self.observed.warnings, self.now, claim_uid)

    @property
    def report(self) -> WorkerReport | None:
        """Of the pod that is there."""
        report = self.observed.report
        return report if report is not None and self.pod is not None and report.pod_uid == self.pod.uid else None

    @property
    def must_restart(self) -> bool:
        """Whether the pod was started with something else than what is wanted now."""
        if self.pod is None or self.worker is None or self.worker.replicas == 0:
            return False
        return self.pod.inputs != inputs_hash(self.session, self.installation, self.worker)

    @property
    def is_hung(self) -> bool:
        report = self.report
        return report is not None and report.running_seconds > self.installation.hang_timeout_seconds


def assess(observed: Observed, installation: Installation, now: datetime) -> Situation:
    restart = restart_request(observed)
    image_plan = plan_image(observed, installation, restart)
    claim = _usable_claim(observed)
    worker, awaits = None, False
    if claim is not None:
        runs = not observed.session.spec.suspend and not image_plan.stop_first
        worker = WorkerPlan(claim["metadata"]["uid"], image_plan.pins.image, 1 if runs else 0, restart)
        awaits = awaits_conversion(observed, worker)
        worker = replace(worker, replicas=0) if awaits else worker
    pod = Pod(observed.pod) if observed.pod is not None and pod_is_ours(observed) else None
    members = tuple(Pod(member) for member in observed.members if is_of_own_workload(observed, member))
    return Situation(observed, installation, now, image_plan, pod, members, claim, worker, awaits)


def claim_mismatch(session: TrainingSession, claim: Manifest) -> str | None:
    """In which field a claim that was kept from an earlier session is not what this one asks for."""
    storage, spec = session.spec.storage, claim["spec"]
    if spec.get("accessModes") != [storage.access_mode.value]:
        return f"accessMode {', '.join(spec.get('accessModes') or ())}, not {storage.access_mode.value}"
    wanted = storage.storage_class_name
    if wanted is not None and spec.get("storageClassName") != wanted:
        return f"storageClassName {spec.get('storageClassName')}, not {wanted}"
    return None


def _usable_claim(observed: Observed) -> Manifest | None:
    session, claim = observed.session, observed.claim
    if observed.claim_holder is not None:
        return None
    if claim is None or session.spec.storage.existing_claim is not None:
        return claim
    return claim if claim_is_ours(session, claim) and claim_mismatch(session, claim) is None else None
