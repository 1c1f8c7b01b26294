"""The Jobs of a session.

One Job converts the session's model. Another Job pulls a new image before the worker is stopped for the upgrade.
"""

from __future__ import annotations

from tinsmith_operator.api.names import IMAGE_PULL_ANNOTATION
from tinsmith_operator.build.jobs import build_conversion, build_image_pull, image_pull_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.common.actions import Action, Create, Delete
from tinsmith_operator.common.ownership import ORPHANED, controller_of
from tinsmith_operator.common.workloads import Job
from tinsmith_operator.session.restart import calls_for_restart, change_of
from tinsmith_operator.session.situation import Situation, converts_now


def ensure_conversion(situation: Situation) -> tuple[Action, ...]:
    observed, worker, job = situation.observed, situation.worker, situation.owned.conversion
    if worker is None:
        return ()
    if observed.conversion is None:
        # A conversion takes long, so the Job starts only if the session could run afterwards.
        begins = situation.awaits_conversion and observed.no_groups is None
        return (Create(build_conversion(situation.session, situation.installation, worker)),) if begins else ()
    if job is None:
        return ()
    why = ORPHANED if controller_of(job.manifest) is None else _why_delete(job, situation, worker)
    return _delete(job, why) if why is not None else ()


def end_conversion(situation: Situation, why: str) -> tuple[Delete, ...]:
    """Delete the conversion Job if the session is being deleted or must have no pods."""
    job = situation.owned.conversion
    return _delete(job, why) if job is not None else ()


def _why_delete(job: Job, situation: Situation, worker: WorkerPlan) -> str | None:
    if not situation.session.spec.is_converted_once:
        return "its session has no model cache now"
    if not converts_now(job, situation.session, worker):
        return "it converts another model, into another cache, or with another image"
    if job.is_complete:
        return None
    if not situation.awaits_conversion:
        return "nothing waits for it now"
    change = change_of(job.template, situation.session, situation.installation, worker)
    if calls_for_restart(change, job.tries, has_turn=True):
        return "the session's spec or settings have changed since it started"
    return None


def _delete(job: Job, why: str) -> tuple[Delete, ...]:
    return () if job.is_terminating else (Delete("Job", job.name, job.uid, why),)


def ensure_image_pull(situation: Situation) -> tuple[Action, ...]:
    """Create the image pull Job while an image must be pulled.

    Delete the Job when the worker stops, or when another image must be pulled.
    """
    plan, job = situation.image_plan, situation.owned.image_pull
    if plan.pulls_on is None:
        return end_image_pull(situation, "nothing waits for its image now")
    if situation.observed.image_pull is None:
        return (Create(build_image_pull(situation.session, situation.installation, plan.requested, plan.pulls_on)),)
    if job is not None and not pulls_image(job, plan.requested, plan.pulls_on):
        return end_image_pull(situation, "another image is wanted, or on another node")
    return ()


def end_image_pull(situation: Situation, why: str) -> tuple[Delete, ...]:
    job = situation.owned.image_pull
    return (Delete("Job", job.name, job.uid, why),) if job is not None and not job.is_terminating else ()


def pulls_image(job: Job, image: str, node: str) -> bool:
    is_adopted = controller_of(job.manifest) is not None  # replace a Job of an earlier session
    return is_adopted and job.annotation(IMAGE_PULL_ANNOTATION) == image_pull_digest(image, node)
