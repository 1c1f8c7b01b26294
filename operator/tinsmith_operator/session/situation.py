"""The facts for the decisions and conditions of a session.

The facts are computed once from the session's observed state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import ConditionType, Finding
from tinsmith_operator.api.names import CONVERSION_ANNOTATION
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import AdapterUsage, IdleState
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.jobs import conversion_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.common.diagnosis import Evidence, blocking_reason, lost_node
from tinsmith_operator.common.idleness import Use, assess_idleness, stop_reason, use_of
from tinsmith_operator.common.observed import Observed, SnapshotAnswer, WorkerReport
from tinsmith_operator.common.ownership import OwnedObjects, owned_objects
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.redaction import redacted_line
from tinsmith_operator.common.requests import restart_request
from tinsmith_operator.common.workloads import Job
from tinsmith_operator.installation import Installation
from tinsmith_operator.session.claim import ClaimPlan, plan_claim
from tinsmith_operator.session.restart import RestartPlan, plan_restart
from tinsmith_operator.session.upgrade import ImagePlan, Pins, plan_image, read_pins


@dataclass(frozen=True)
class Situation:
    """The situation of a session at one moment: the observed state, the desired state, and the differences.

    - `pins`: the images that the volume records.
    - `image_plan`: the images that the volume should record, and the image to run.
    - `worker`: how the worker should be started; None until the claim exists.
    - `desired`: the desired StatefulSet or RayCluster; None while the workload cannot be built.
    - `awaits_conversion`: the worker starts only after the Job has converted the model.
    - `blocking_reason`: why the session must have no pods.
    - `report`: the latest report, if the present pod sent this report.
    - `adapters`: the numbers in the latest report, even while no worker runs.
    - `snapshot`: the worker's answer to a request for a snapshot, redacted.
    - `lost_node`: a node of the session's pods does not answer.
    - `use`, `idle`: the use by clients that the present pod reports, and the idle state for the status.
    - `stop_reason`: why the session must have no worker although its spec asks for one.
    """

    observed: Observed
    owned: OwnedObjects
    installation: Installation
    now: datetime
    pins: Pins | None
    image_plan: ImagePlan
    claim_plan: ClaimPlan
    worker: WorkerPlan | None
    desired: Manifest | None
    awaits_conversion: bool
    blocking_reason: Finding | None
    evidence: Evidence
    report: WorkerReport | None
    adapters: AdapterUsage | None
    snapshot: SnapshotAnswer | None
    restart: RestartPlan
    is_hung: bool
    lost_node: Finding | None
    use: Use | None
    idle: IdleState | None
    stop_reason: Finding | None

    @property
    def session(self) -> TrainingSession:
        return self.observed.session

    @property
    def pod(self) -> Pod | None:
        """The worker's pod."""
        return self.owned.pod

    @property
    def members(self) -> tuple[Pod, ...]:
        """The other pods of a session with several nodes."""
        return self.owned.members

    @property
    def is_stopped(self) -> bool:
        """True if the session must have no worker now: it is suspended, idle, or past its deadline."""
        return self.session.spec.suspend or self.stop_reason is not None

    @property
    def claim(self) -> Manifest | None:
        """The claim that holds the journal, if the session may use this claim."""
        return self.claim_plan.usable


def assess(observed: Observed, installation: Installation, now: datetime) -> Situation:
    session, owned = observed.session, owned_objects(observed, installation.policy)
    restart = restart_request(session, owned.workload)
    pins = read_pins(observed.claim)
    image_plan = plan_image(pins, observed, owned, installation, restart)
    claim_plan = plan_claim(observed, owned, image_plan.pins.annotations())
    report = _report_of(owned.pod, observed.report)
    # The last report of a pod that stops is not about the pod that a wake request asks for.
    stays = owned.pod is not None and not owned.pod.is_terminating
    use = use_of([report] if report is not None and stays else [])
    idle = assess_idleness(session, use, now)
    reason_to_stop = stop_reason(session, idle, now)
    runs = not session.spec.suspend and reason_to_stop is None and not image_plan.stop_first
    worker, awaits = _plan_worker(observed, owned, image_plan, claim_plan.usable, restart, runs=runs)
    return Situation(
        observed=observed,
        owned=owned,
        installation=installation,
        now=now,
        pins=pins,
        image_plan=image_plan,
        claim_plan=claim_plan,
        worker=worker,
        desired=_desired(observed, installation, worker),
        awaits_conversion=awaits,
        evidence=_evidence(observed, claim_plan.usable, now),
        report=report,
        adapters=_adapters(session, report),
        is_hung=report is not None and report.running_seconds > installation.hang_timeout_seconds,
        restart=plan_restart(observed, owned, installation, worker, pulls=image_plan.pulls_on is not None),
        blocking_reason=blocking_reason(observed, installation, image_plan.pins.image.reference),
        lost_node=lost_node(_awaited_pods(owned, awaits_conversion=awaits), now),
        snapshot=_redacted(observed.snapshot, owned.pod),
        use=use,
        idle=idle,
        stop_reason=reason_to_stop,
    )


def _desired(observed: Observed, installation: Installation, worker: WorkerPlan | None) -> Manifest | None:
    if worker is None or (observed.session.spec.is_group and observed.no_groups is not None):
        return None
    return build_workload(observed.session, installation, worker)


def _awaited_pods(owned: OwnedObjects, *, awaits_conversion: bool) -> tuple[Pod, ...]:
    """Return the pods for which the session waits. The session does not wait for the pods of an earlier Job."""
    if owned.conversion is None or not awaits_conversion:
        return owned.pods
    return (*owned.pods, *(pod for pod in owned.conversion.tries if not pod.has_ended))


def _plan_worker(
    observed: Observed,
    owned: OwnedObjects,
    image_plan: ImagePlan,
    claim: Manifest | None,
    restart: str | None,
    *,
    runs: bool,
) -> tuple[WorkerPlan | None, bool]:
    """Return the plan for the worker, and whether the worker waits for the conversion of the model."""
    if claim is None:
        return None, False
    plan = WorkerPlan(claim["metadata"]["uid"], image_plan.pins.image, 1 if runs else 0, restart)
    awaits = _awaits_conversion(observed, owned, plan)
    return (replace(plan, replicas=0) if awaits else plan), awaits


def _awaits_conversion(observed: Observed, owned: OwnedObjects, plan: WorkerPlan) -> bool:
    """Return whether the model must be converted before the session has pods.

    A running worker is not stopped for a conversion, because the worker converts the model itself if necessary.
    """
    if not observed.session.spec.is_converted_once or plan.replicas == 0 or _has_pod(observed):
        return False
    if owned.workload is not None and owned.workload.wants_pods:
        return False
    job = owned.conversion
    return job is None or not (job.is_complete and converts_now(job, observed.session, plan))


def converts_now(job: Job, session: TrainingSession, plan: WorkerPlan) -> bool:
    """Return whether this Job makes the conversion that the session needs."""
    return job.annotation(CONVERSION_ANNOTATION) == conversion_digest(session, plan)


def _has_pod(observed: Observed) -> bool:
    """Return whether a pod exists that is not terminating.

    A terminating pod does not count, because the pod may belong to an earlier session with the same name.
    """
    return observed.pod is not None and "deletionTimestamp" not in observed.pod["metadata"]


def _report_of(pod: Pod | None, report: WorkerReport | None) -> WorkerReport | None:
    return report if report is not None and pod is not None and report.pod_uid == pod.uid else None


def _adapters(session: TrainingSession, report: WorkerReport | None) -> AdapterUsage | None:
    """Return the latest numbers of adapters. While no worker runs, the adapters are kept on the volume."""
    if report is None:
        return session.status.adapters
    used, capacity = report.adapters_used, report.model_places
    return AdapterUsage(used=used, capacity=capacity, summary=f"{used}/{capacity}")


def _redacted(answer: SnapshotAnswer | None, pod: Pod | None) -> SnapshotAnswer | None:
    if answer is None or answer.problem is None:
        return answer
    is_quoted = pod is not None and pod.is_vouched_for
    return replace(answer, problem=redacted_line(answer.problem) if is_quoted else "the worker's log says why")


def _evidence(observed: Observed, claim: Manifest | None, now: datetime) -> Evidence:
    ready = observed.session.status.condition(ConditionType.READY)
    return Evidence(
        observed.warnings,
        now,
        claim_uid=claim["metadata"]["uid"] if claim is not None else None,
        was_preempted=ready is not None and ready.reason == Reason.PREEMPTED,
    )
