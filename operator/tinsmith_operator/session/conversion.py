"""The Job that converts a session's model: what to do about it, and why the model is not converted yet."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.build.conversion import build_conversion, conversion_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.common.actions import Action, Create, Delete
from tinsmith_operator.common.diagnosis import (
    FRESH_RUN,
    POD_CREATION_WARNINGS,
    WORKER_REASONS,
    found,
    quoted,
    why_pod_does_not_run,
    why_pods_are_missing,
)
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.session.conversion_job import ConversionJob
from tinsmith_operator.session.situation import Situation


def ensure_conversion(situation: Situation) -> tuple[Action, ...]:
    observed, worker, job = situation.observed, situation.worker, situation.conversion
    if worker is None:
        return ()
    if observed.conversion is None:
        # Nothing that takes long is begun for a session that could not run then.
        begins = situation.awaits_conversion and observed.no_groups is None
        return (Create(build_conversion(situation.session, situation.installation, worker)),) if begins else ()
    if job is None or (why := _why_delete(job, situation, worker)) is None:
        return ()
    return _delete(job, why)


def end_conversion(situation: Situation) -> tuple[Delete, ...]:
    """Of a session that is being deleted."""
    job = situation.conversion
    return _delete(job, "its session is being deleted") if job is not None else ()


def _why_delete(job: ConversionJob, situation: Situation, worker: WorkerPlan) -> str | None:
    if not situation.session.spec.is_converted_once:
        return "its session has no model cache any more"
    if job.result != conversion_digest(situation.session, worker):
        return "it converts another model, for another place or with another image"
    if job.is_complete:
        return None
    if not situation.awaits_conversion:
        return "nothing waits for it now"
    return None if job.inputs == situation.inputs else "it was begun with something else than the spec says now"


def _delete(job: ConversionJob, why: str) -> tuple[Delete, ...]:
    return () if job.is_terminating else (Delete("Job", job.name, job.uid, why),)


def why_not_converted(situation: Situation) -> Finding | None:
    """Nothing where the worker does not wait for it."""
    if not situation.awaits_conversion:
        return None
    job = situation.conversion
    if job is None or job.is_terminating:
        return found(Reason.CREATING_OBJECTS, "The Job that converts the model is being created.")
    if (gave_up := job.failure) is not None:
        words = next((_last_words(each) for each in reversed(job.tries) if each.has_failed), quoted(gave_up))
        return found(Reason.CONVERSION_FAILED, f"{_name(job)} gave up: {words}.")
    return _of_a_try(job, situation)


def _of_a_try(job: ConversionJob, situation: Situation) -> Finding:
    failed = [each for each in job.tries if each.has_failed]
    pod = next((each for each in job.tries if not each.has_ended), None)
    before = _failed_try(job, failed) if failed else None
    if pod is None:
        return before or _without_pod(job, situation)
    if trouble := why_pod_does_not_run(pod, situation.evidence):
        return trouble
    assert pod.running_since is not None
    if before is not None and situation.now < pod.running_since + FRESH_RUN:
        return before
    where = f"{_name(job)} brings the model into the model cache, on node {pod.node_name}"
    return found(Reason.CONVERTING_MODEL, f"{where}; the worker starts when it is done.")


def _without_pod(job: ConversionJob, situation: Situation) -> Finding:
    if job.is_suspended:
        return found(Reason.CONVERTING_MODEL, f"{_name(job)} is suspended, and goes on when whoever did that lets it.")
    warning = situation.evidence.latest(job.uid, POD_CREATION_WARNINGS)
    return why_pods_are_missing(warning.message if warning is not None else None)


def _failed_try(job: ConversionJob, failed: Sequence[Pod]) -> Finding:
    """The next one follows by itself."""
    latest = failed[-1]
    record = latest.latest_ending.record if latest.latest_ending is not None else None
    reason = WORKER_REASONS.get(record.reason) if record is not None else None
    said = f"Try {len(failed)} of {_name(job)} failed, and another one follows: {_last_words(latest)}."
    return found(reason or Reason.CONVERTING_MODEL, said)


def _last_words(pod: Pod) -> str:
    ending = pod.latest_ending
    if ending is None:
        return f"pod {pod.name} was ended from outside"
    if ending.record is not None:
        return quoted(ending.record.message)
    if ending.out_of_memory:
        return "it was killed for want of memory; it gets as much as spec.resources says of each of the session's pods"
    if ending.words:
        return f"it ended with status {ending.exit_code} and said: {quoted(ending.words)}"
    return f"it ended with status {ending.exit_code}; read kubectl logs {pod.name}"


def _name(job: ConversionJob) -> str:
    return f"Job {job.name}"
