"""Whether a session's pods wait for the Job that converts its model."""

from __future__ import annotations

from tinsmith_operator.api.names import CONVERSION_ANNOTATION
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.conversion import conversion_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.common.job import Job
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.common.ownership import OwnedObjects


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
