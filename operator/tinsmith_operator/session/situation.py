"""What follows from what is there, worked out once: decisions and conditions only read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import ConditionType, Finding
from tinsmith_operator.api.names import CONVERSION_ANNOTATION
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import AdapterUsage
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.jobs import conversion_digest
from tinsmith_operator.build.volumes import build_claim, build_claim_annotations
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.common.diagnosis import CLAIM, Evidence, bar_of, found
from tinsmith_operator.common.drift import as_stored, holds, spec_fields_of_ours
from tinsmith_operator.common.last_words import is_vouched_for, told
from tinsmith_operator.common.observed import Observed, SnapshotAnswer, WorkerReport
from tinsmith_operator.common.ownership import OwnedObjects, owned_objects
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.requests import restart_request
from tinsmith_operator.common.workloads import Job, read_job
from tinsmith_operator.installation import Installation
from tinsmith_operator.session.restart import Difference, difference, is_reason_to_restart
from tinsmith_operator.session.upgrade import ImagePlan, Pins, plan_image, read_pins


@dataclass(frozen=True)
class Situation:
    """What the decisions of one moment share.

    pins: what the volume knows of images. image_plan: what it should know, and run.
    claim: the one with the journal, if it may be used. desired_claim: as it should be; of somebody else's, as far as we
        write into it.
    worker: how it should be started; None until there is a claim.
    desired: the StatefulSet or RayCluster as it should be; None while none can be made.
    image_pull: the Job that pulls another image.
    conversion: the session's Job. converters: the pods that convert its model or have done so, the latest last.
    awaits_conversion: whether it starts as soon as its model is converted, and not before.
    bar: why it must have no pods.
    """

    observed: Observed
    owned: OwnedObjects
    installation: Installation
    now: datetime
    pins: Pins | None
    image_plan: ImagePlan
    claim: Manifest | None
    desired_claim: Manifest
    worker: WorkerPlan | None
    desired: Manifest | None
    conversion: Job | None
    converters: tuple[Pod, ...]
    image_pull: Job | None
    awaits_conversion: bool
    bar: Finding | None

    @property
    def session(self) -> TrainingSession:
        return self.observed.session

    @property
    def pod(self) -> Pod | None:
        """The worker's."""
        return self.owned.pod

    @property
    def members(self) -> tuple[Pod, ...]:
        """The other pods of a session of several."""
        return self.owned.members

    @property
    def evidence(self) -> Evidence:
        claim_uid = self.claim["metadata"]["uid"] if self.claim is not None else None
        said = self.session.status.condition(ConditionType.READY)
        was_preempted = said is not None and said.reason == Reason.PREEMPTED
        return Evidence(self.observed.warnings, self.now, self.installation.policy, claim_uid, was_preempted)

    @property
    def snapshot(self) -> SnapshotAnswer | None:
        """What the worker answered to a request for one, as far as its words are for others."""
        answer = self.observed.snapshot
        if answer is None or answer.problem is None:
            return answer
        is_ours = self.pod is not None and is_vouched_for(self.pod, self.installation.policy)
        return replace(answer, problem=told(answer.problem) if is_ours else "the worker's log says why")

    @property
    def claim_is_terminating(self) -> bool:
        """Whether somebody has deleted it: it will vanish when no pod uses it."""
        return self.claim is not None and "deletionTimestamp" in self.claim["metadata"]

    @property
    def unused_claim(self) -> Manifest | None:
        """The session's claim where it never had a volume and is not what the spec asks for now: the API server lets
        nothing of it be changed."""
        claim, session, writer = self.owned.claim, self.session, self.owned.writer
        if claim is None or self.observed.claim_holder is not None or has_volume(claim):
            return None
        if writer is not None and writer.has_started:
            return None
        # What a webhook makes of the claim each time would be deleted each time.
        if as_stored(self.desired_claim, claim) == self.observed.stored.get(claim["kind"]):
            return None
        wanted = {"requests": {"storage": session.spec.storage.size}}
        differs = not holds(claim["spec"]["resources"], wanted) or claim_mismatch(session, claim) is not None
        return claim if differs or _names_a_class_no_more(session, claim) else None

    @property
    def report(self) -> WorkerReport | None:
        """Of the pod that is there."""
        report = self.observed.report
        return report if report is not None and self.pod is not None and report.pod_uid == self.pod.uid else None

    @property
    def adapters(self) -> AdapterUsage | None:
        """As last reported: adapters stay on the volume while no worker runs."""
        report = self.report
        if report is None:
            return self.session.status.adapters
        used, capacity = report.adapters_used, report.model_places
        return AdapterUsage(used=used, capacity=capacity, summary=f"{used}/{capacity}")

    @property
    def waiting_since(self) -> datetime | None:
        """When we said that its deletion waits for checkpoints: by our own clock, since the API server's, which dates
        the deletion, need not agree."""
        said = self.session.status.condition(ConditionType.RECONCILING)
        if said is None or said.reason != Reason.WAITING_FOR_CHECKPOINTS:
            return None
        return said.last_transition_time

    @property
    def must_restart(self) -> bool:
        """Whether the pod was started with something else than is wanted now, by somebody whose word counts at once."""
        if self.pod is None or self.worker is None or self.worker.replicas == 0:
            return False
        return self.calls_for_restart(self.pod.manifest)

    def calls_for_restart(self, live: Manifest) -> bool:
        """live: the pod, or the template of the next one. While another image is pulled, one restart for both waits."""
        if self.image_plan.pulls_on is not None:
            return False
        pods = (*([self.pod] if self.pod is not None else []), *self.members)
        return is_reason_to_restart(self.difference_of(live), pods, has_turn=self.observed.has_turn)

    def difference_of(self, live: Manifest) -> Difference:
        if self.worker is None:
            return Difference.NONE
        return difference(live, self.session, self.installation, self.worker)

    @property
    def settings_differ(self) -> bool:
        """Whether the pod runs with what the installation said before, and would not after a restart."""
        if self.pod is None or self.worker is None or self.worker.replicas == 0:
            return False
        return self.difference_of(self.pod.manifest) is Difference.SETTINGS

    @property
    def upgrade_waits(self) -> bool:
        """Whether a restart would bring something that nobody asked it for."""
        return self.image_plan.available is not None or self.settings_differ

    @property
    def is_hung(self) -> bool:
        report = self.report
        return report is not None and report.running_seconds > self.installation.hang_timeout_seconds


def assess(observed: Observed, installation: Installation, now: datetime) -> Situation:
    session, owned = observed.session, owned_objects(observed)
    restart = restart_request(session, owned.workload)
    pins = read_pins(observed.claim)
    image_plan = plan_image(pins, observed, owned, installation, restart)
    annotations = image_plan.pins.annotations()
    claim = _usable_claim(observed, owned)
    converters = _in_order(observed.converters)
    conversion = read_job(owned.conversion, converters) if owned.conversion is not None else None
    worker, desired, awaits = None, None, False
    if claim is not None:
        runs = not session.spec.suspend and not image_plan.stop_first
        worker = WorkerPlan(claim["metadata"]["uid"], image_plan.pins.image, 1 if runs else 0, restart)
        awaits = awaits_conversion(observed, owned, conversion, worker)
        worker = replace(worker, replicas=0) if awaits else worker
        if not session.spec.is_group or observed.no_groups is None:
            desired = build_workload(session, installation, worker)
    return Situation(
        observed=observed,
        owned=owned,
        installation=installation,
        now=now,
        pins=pins,
        image_plan=image_plan,
        claim=claim,
        desired_claim=build_claim(session, annotations) or build_claim_annotations(session, annotations),
        worker=worker,
        desired=desired,
        conversion=conversion,
        converters=converters,
        image_pull=read_job(owned.image_pull, _in_order(observed.pullers)) if owned.image_pull is not None else None,
        awaits_conversion=awaits,
        bar=_bar_of(observed, installation, image_plan.pins.image.reference),
    )


def _bar_of(observed: Observed, installation: Installation, image: str) -> Finding | None:
    if observed.claim_reader is None:
        return bar_of(observed, installation, image)
    return found(
        Reason.CLAIM_IS_READ,
        f"{CLAIM} {observed.session.claim_name} (spec.storage.existingClaim) has the model of {observed.claim_reader}.",
    )


def _in_order(pods: Sequence[Manifest]) -> tuple[Pod, ...]:
    return tuple(Pod(pod) for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp"))))


def claim_mismatch(session: TrainingSession, claim: Manifest) -> str | None:
    """In which field a claim that an earlier session left is not what this one asks for."""
    storage, spec = session.spec.storage, claim["spec"]
    if spec.get("accessModes") != [storage.access_mode.value]:
        return f"accessMode {', '.join(spec.get('accessModes') or ())}, not {storage.access_mode.value}"
    wanted = storage.storage_class_name
    if wanted is not None and spec.get("storageClassName") != wanted:
        return f"storageClassName {spec.get('storageClassName')}, not {wanted}"
    return None


def has_volume(claim: Manifest) -> bool:
    """Return whether the claim has a volume or had one: it is bound once."""
    return "volumeName" in claim["spec"] or (claim.get("status") or {}).get("phase", "Pending") != "Pending"


def _names_a_class_no_more(session: TrainingSession, claim: Manifest) -> bool:
    is_ours = "storageClassName" in spec_fields_of_ours(claim)
    return is_ours and session.spec.storage.storage_class_name is None


def _usable_claim(observed: Observed, owned: OwnedObjects) -> Manifest | None:
    session, claim = observed.session, observed.claim
    if observed.claim_holder is not None or observed.claim_reader is not None:
        return None
    if claim is None or session.spec.storage.existing_claim is not None:
        return claim
    return claim if owned.claim is not None and claim_mismatch(session, claim) is None else None


def converts_now(job: Job, session: TrainingSession, plan: WorkerPlan) -> bool:
    """Whether its result is the one that is wanted."""
    return job.annotation(CONVERSION_ANNOTATION) == conversion_digest(session, plan)


def awaits_conversion(observed: Observed, owned: OwnedObjects, job: Job | None, plan: WorkerPlan) -> bool:
    """Whether the model must be converted before there are pods.

    Only before they start: what runs already is not stopped for it, since a worker converts what it does not find.
    """
    if not observed.session.spec.is_converted_once or plan.replicas == 0 or _has_pod(observed):
        return False
    if owned.workload is not None and owned.workload.wants_pods:
        return False
    return job is None or not (job.is_complete and converts_now(job, observed.session, plan))


def _has_pod(observed: Observed) -> bool:
    """One on its way out may be of an earlier session of that name, whose successor has not begun."""
    return observed.pod is not None and "deletionTimestamp" not in observed.pod["metadata"]
