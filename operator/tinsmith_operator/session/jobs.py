"""The Job that converts a session's model: what to do about it, and why the model is not converted yet."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS
from tinsmith_operator.api.names import IMAGE_PULL_ANNOTATION
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.build.jobs import build_conversion, build_image_pull, image_pull_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.common.actions import Action, Create, Delete
from tinsmith_operator.common.diagnosis import (
    FRESH_RUN,
    WORKER_REASONS,
    found,
    in_its_words,
    queued,
    why_pod_does_not_run,
    why_pods_are_missing,
)
from tinsmith_operator.common.last_words import is_vouched_for, last_words, quoted, where_its_log_is
from tinsmith_operator.common.ownership import ORPHANED, controller_of
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.workloads import Job
from tinsmith_operator.session.restart import is_reason_to_restart
from tinsmith_operator.session.situation import Situation, converts_now


def ensure_conversion(situation: Situation) -> tuple[Action, ...]:
    observed, worker, job = situation.observed, situation.worker, situation.conversion
    if worker is None:
        return ()
    if observed.conversion is None:
        # Nothing that takes long is begun for a session that could not run then.
        begins = situation.awaits_conversion and observed.no_groups is None
        return (Create(build_conversion(situation.session, situation.installation, worker)),) if begins else ()
    if job is None:
        return ()
    why = ORPHANED if controller_of(job.manifest) is None else _why_delete(job, situation, worker)
    return _delete(job, why) if why is not None else ()


def end_conversion(situation: Situation, why: str) -> tuple[Delete, ...]:
    """Of a session that is being deleted, or must have no pods."""
    job = situation.conversion
    return _delete(job, why) if job is not None else ()


def _why_delete(job: Job, situation: Situation, worker: WorkerPlan) -> str | None:
    if not situation.session.spec.is_converted_once:
        return "its session has no model cache any more"
    if not converts_now(job, situation.session, worker):
        return "it converts another model, for another place or with another image"
    if job.is_complete:
        return None
    if not situation.awaits_conversion:
        return "nothing waits for it now"
    found = situation.difference_of(job.template)
    if is_reason_to_restart(found, job.tries, has_turn=True):
        return "it was begun with something else than is wanted now"
    return None


def _delete(job: Job, why: str) -> tuple[Delete, ...]:
    return () if job.is_terminating else (Delete("Job", job.name, job.uid, why),)


def why_not_converted(situation: Situation) -> Finding | None:
    """Nothing where the worker does not wait for it."""
    if not situation.awaits_conversion:
        return None
    job = situation.conversion
    if job is None or job.is_terminating:
        return found(Reason.CREATING_OBJECTS, "The Job that converts the model is being created.")
    if (gave_up := job.failure) is not None:
        words = next(
            (_how_it_ended(each, situation) for each in reversed(job.tries) if each.has_failed), quoted(gave_up)
        )
        return found(Reason.CONVERSION_FAILED, f"{_name(job)} gave up: {words}.")
    return _of_a_try(job, situation)


def _of_a_try(job: Job, situation: Situation) -> Finding:
    failed = [each for each in job.tries if each.has_failed]
    pod = next((each for each in job.tries if not each.has_ended), None)
    before = _failed_try(job, failed, situation) if failed else None
    if pod is None:
        return before or _without_pod(job, situation)
    if trouble := why_pod_does_not_run(pod, situation.evidence):
        return trouble
    assert pod.running_since is not None
    if before is not None and situation.now < pod.running_since + FRESH_RUN:
        return before
    where = f"{_name(job)} brings the model into the model cache, on node {pod.node_name}"
    return found(Reason.CONVERTING_MODEL, f"{where}; the worker starts when it is done.")


def _without_pod(job: Job, situation: Situation) -> Finding:
    if job.is_suspended:
        return queued(job.manifest)
    warning = situation.evidence.latest(job.uid, CREATION_EVENTS)
    return why_pods_are_missing(warning.message if warning is not None else None)


def _failed_try(job: Job, failed: Sequence[Pod], situation: Situation) -> Finding:
    """The next one follows by itself."""
    latest = failed[-1]
    record = latest.latest_ending.record if latest.latest_ending is not None else None
    reason = WORKER_REASONS.get(record.reason) if record is not None else None
    said = f"Try {len(failed)} of {_name(job)} failed, and another one follows: {_how_it_ended(latest, situation)}."
    is_quoted = is_vouched_for(latest, situation.installation.policy)
    return in_its_words(reason or Reason.CONVERTING_MODEL, said, is_quoted=is_quoted)


def _how_it_ended(pod: Pod, situation: Situation) -> str:
    ending = pod.latest_ending
    if ending is None:
        return f"pod {pod.name} was ended from outside"
    if ending.out_of_memory and ending.record is None:
        return "it was killed for want of memory; it gets as much as spec.resources says of each of the session's pods"
    words = last_words(pod, ending, situation.installation.policy)
    if words is None:
        return f"it ended with status {ending.exit_code}; {where_its_log_is(pod)}"
    return words if ending.record is not None else f"it ended with status {ending.exit_code} and said: {words}"


def _name(job: Job) -> str:
    return f"Job {job.name}"


def ensure_image_pull(situation: Situation) -> tuple[Action, ...]:
    """The Job is made while the image is wanted, and deleted with its pod once the worker stops or wants another."""
    plan, job = situation.image_plan, situation.image_pull
    if plan.pulls_on is None:
        return end_image_pull(situation, "nothing waits for its image")
    if situation.observed.image_pull is None:
        return (Create(build_image_pull(situation.session, situation.installation, plan.requested, plan.pulls_on)),)
    if job is not None and not _is_wanted(job, plan.requested, plan.pulls_on):
        return end_image_pull(situation, "another image is wanted, or on another node")
    return ()


def end_image_pull(situation: Situation, why: str) -> tuple[Delete, ...]:
    job = situation.image_pull
    return (Delete("Job", job.name, job.uid, why),) if job is not None and not job.is_terminating else ()


def why_not_pulled(situation: Situation) -> Finding | None:
    """Return None where no image is awaited."""
    plan, job = situation.image_plan, situation.image_pull
    if plan.pulls_on is None:
        return None
    runs = f"{plan.pins.image.reference} runs meanwhile"
    pulling = found(Reason.PULLING_IMAGE, f"Node {plan.pulls_on} pulls {plan.requested}, and {runs}.")
    if job is None or job.is_terminating or not _is_wanted(job, plan.requested, plan.pulls_on):
        return pulling
    if job.failure is not None:
        failed = f"Job {job.name} with {plan.requested} failed on node {plan.pulls_on}: {_why_it_failed(job)}"
        cure = "name an image that runs, or delete the Job to have it tried again"
        return Finding(Reason.CANNOT_START, f"{failed}; {runs}; {cure}.")
    trouble = _trouble_of(job, situation)
    if trouble is None or trouble.reason in (Reason.PREPARING_POD, Reason.CREATING_OBJECTS):
        return pulling
    return Finding(trouble.reason, f"{trouble.message} {runs}.")


def _why_it_failed(job: Job) -> str:
    """Quote the node where it ended the pod, as for want of disk: that says nothing about the image."""
    latest = next((each for each in reversed(job.tries) if each.has_failed), None)
    if latest is None or not latest.status_reason:
        return "the image was pulled and does not run Python"
    return quoted(": ".join(part for part in (latest.status_reason, latest.status_message) if part))


def _trouble_of(job: Job, situation: Situation) -> Finding | None:
    pod = next((each for each in reversed(job.tries) if not each.has_ended), None)
    if pod is not None:
        return why_pod_does_not_run(pod, situation.evidence)
    if job.is_suspended:
        return queued(job.manifest)
    warning = situation.evidence.latest(job.uid, CREATION_EVENTS)
    return why_pods_are_missing(warning.message) if warning is not None else None


def _is_wanted(job: Job, image: str, node: str) -> bool:
    is_adopted = controller_of(job.manifest) is not None  # one that an earlier session left behind is made anew
    return is_adopted and job.annotation(IMAGE_PULL_ANNOTATION) == image_pull_digest(image, node)
