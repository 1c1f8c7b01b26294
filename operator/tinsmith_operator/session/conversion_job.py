"""What the Job that converts a session's model says, and whether the session's pods wait for it."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import CONVERSION_ANNOTATION
from tinsmith_operator.build.conversion import conversion_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.common.ownership import is_ours, own_workload
from tinsmith_operator.common.workload_state import wants_pods


def awaits_conversion(observed: Observed, plan: WorkerPlan) -> bool:
    """Whether the model must be converted before there are pods.

    Only before they start: what runs already is not stopped for it, since a worker converts what it does not find.
    """
    if not observed.session.spec.is_converted_once or plan.replicas == 0 or _has_pod(observed):
        return False
    workload = own_workload(observed)
    if workload is not None and wants_pods(workload):
        return False
    job = own_conversion(observed)
    return job is None or not (is_complete(job) and converts_what(job, observed, plan))


def _has_pod(observed: Observed) -> bool:
    """One on its way out may be of an earlier session of that name, whose successor has not begun."""
    return observed.pod is not None and "deletionTimestamp" not in observed.pod["metadata"]


def own_conversion(observed: Observed) -> Manifest | None:
    """Unless it is a stranger's."""
    job = observed.conversion
    return job if job is not None and is_ours(observed.session, job) else None


def converts_what(job: Manifest, observed: Observed, plan: WorkerPlan) -> bool:
    """Whether its result is the one that is wanted."""
    said = job["metadata"].get("annotations") or {}
    return bool(said.get(CONVERSION_ANNOTATION) == conversion_digest(observed.session, plan))


def is_complete(job: Manifest) -> bool:
    return _condition(job, "Complete") is not None


def failure_of(job: Manifest) -> str | None:
    """Why it gave up, as its controller says it; None while it has not."""
    failed = _condition(job, "Failed")
    return str(failed.get("message", "")) if failed is not None else None


def _condition(job: Manifest, type_: str) -> Manifest | None:
    """If it holds."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if (each["type"], each["status"]) == (type_, "True")), None)
