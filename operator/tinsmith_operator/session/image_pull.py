"""Pulls another image onto the worker's node before the worker stops for it: what to do, and why it is not there."""

from __future__ import annotations

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS
from tinsmith_operator.api.names import IMAGE_PULL_ANNOTATION
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.build.image_pull import build_image_pull, image_pull_digest
from tinsmith_operator.common.actions import Action, Create, Delete
from tinsmith_operator.common.diagnosis import (
    found,
    queued,
    why_pod_does_not_run,
    why_pods_are_missing,
)
from tinsmith_operator.common.job import Job
from tinsmith_operator.common.last_words import quoted
from tinsmith_operator.common.ownership import controller_of
from tinsmith_operator.session.situation import Situation


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
