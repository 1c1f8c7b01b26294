"""What to do about the Job that converts a session's model.

It is made and deleted, never changed: the API server lets nobody change what a Job runs. One that has converted what is
wanted stays, whatever else the spec says since. One that has not is made anew where what was said of its pods is other
than it was, as pods of workers are: a change of the spec, or a restart that was asked for, is another try.
"""

from __future__ import annotations

from tinsmith_operator.build.conversion import build_conversion
from tinsmith_operator.build.plan import WorkerPlan, inputs_hash
from tinsmith_operator.decide.actions import Action, Create, Delete
from tinsmith_operator.decide.conversion_job import converts_what, is_complete, own_conversion
from tinsmith_operator.decide.situation import Situation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import INPUTS_ANNOTATION


def keep_conversion(situation: Situation) -> tuple[Action, ...]:
    observed, worker, job = situation.observed, situation.worker, own_conversion(situation.observed)
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
    job = own_conversion(situation.observed)
    return _delete(job, "its session is being deleted") if job is not None else ()


def _why_delete(job: Manifest, situation: Situation, worker: WorkerPlan) -> str | None:
    if not situation.session.spec.is_converted_once:
        return "its session has no model cache any more"
    if not converts_what(job, situation.observed, worker):
        return "it converts another model, for another place or with another image"
    if is_complete(job):
        return None
    if not situation.awaits_conversion:
        return "nothing waits for it now"
    said = job["metadata"].get("annotations") or {}
    inputs = inputs_hash(situation.session, situation.installation, worker)
    return None if said.get(INPUTS_ANNOTATION) == inputs else "it was begun with something else than the spec says now"


def _delete(job: Manifest, why: str) -> tuple[Delete, ...]:
    metadata = job["metadata"]
    if "deletionTimestamp" in metadata:
        return ()
    return (Delete("Job", metadata["name"], metadata["uid"], why),)
