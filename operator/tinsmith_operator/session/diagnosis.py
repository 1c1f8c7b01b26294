"""The reasons why a session is not ready. Each reason comes with a sentence that says what to do.

Each function checks for one reason. Only the first finding is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_operator.api.conditions import ConditionType, Finding
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.common import diagnosis as common
from tinsmith_operator.common.diagnosis import (
    CLAIM,
    FRESH_RUN,
    WORKER_REASONS,
    found,
    found_by_worker,
    log_hint,
    preempted,
    queued,
    why_pod_does_not_run,
    why_pod_is_not_ready,
    why_pods_are_missing,
)
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.redaction import quoted
from tinsmith_operator.common.workloads import RAY_CLUSTER, STATEFUL_SET, Job
from tinsmith_operator.session.group import waiting_for_members
from tinsmith_operator.session.jobs import pulls_image
from tinsmith_operator.session.situation import Situation


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a session. `trouble` says why the session is not ready, or will not stay ready."""

    is_ready: bool
    trouble: Finding | None
    refusal: Finding | None
    ca_problem: Finding | None
    terminating_claim: Finding | None
    full_volume: Finding | None
    refused_image: Finding | None
    image_pull: Finding | None


def diagnose(situation: Situation, refusal: Finding | None) -> Diagnosis:
    """Return the findings. `refusal` is the refusal of an object that the operator still wants to write.

    A session is ready if its worker serves and no foreign object has the name of a child.
    """
    observed, pod, plan = situation.observed, situation.pod, situation.image_plan
    conflict = common.name_conflict(situation.session, situation.owned.foreign)
    is_ready = observed.claim_holder is None and pod is not None and pod.is_ready and conflict is None
    stops = (
        situation.blocking_reason is not None
        or situation.is_stopped
        or plan.stop_first
        or situation.restart.must_restart
        or situation.is_hung
    )
    trouble = None
    if stops or not is_ready:
        trouble = situation.blocking_reason or conflict or situation.lost_node or _why_not_ready(situation, refusal)
    return Diagnosis(
        is_ready=is_ready,
        trouble=trouble,
        refusal=refusal,
        ca_problem=common.ca_problem(observed),
        terminating_claim=_terminating_claim(situation),
        full_volume=_full_volume(situation),
        refused_image=_refused_image(situation),
        image_pull=why_not_pulled(situation),
    )


def _full_volume(situation: Situation) -> Finding | None:
    """Return the finding about a full volume, from the latest report.

    Before the first report of a new worker, the previous finding remains, because the new worker uses the same volume.
    """
    report, degraded = situation.report, situation.session.status.condition(ConditionType.DEGRADED)
    was_full = degraded is not None and degraded.reason == Reason.VOLUME_FULL and situation.pod is not None
    if not (report.volume_full if report is not None else was_full):
        return None
    return found(Reason.VOLUME_FULL, "The journal's volume is full: the worker accepts no training, and clients wait.")


def _why_not_ready(situation: Situation, refusal: Finding | None) -> Finding:
    """Return the first reason why the pod of a session is not ready or must not be used."""
    return (
        _claim_trouble(situation, refusal)
        or _suspension(situation)
        or _no_groups(situation)
        or _upgrade(situation)
        or refusal
        or common.missing_certificate(situation.observed)
        or why_not_converted(situation)
        or _queue(situation)
        or _missing_pod(situation)
        or _replacement(situation)
        or _replay(situation, _why_pods_are_not_ready(situation))
    )


def _why_pods_are_not_ready(situation: Situation) -> Finding:
    """Return why the pods are not ready. The worker's own reason comes first.

    A worker without a reason of its own waits for the other pods.
    """
    finding = why_pod_is_not_ready(situation.pod, situation.evidence)
    if not situation.session.spec.is_group or finding.reason is not Reason.LOADING_MODEL:
        return finding
    return waiting_for_members(situation) or finding


def _missing_pod(situation: Situation) -> Finding | None:
    if situation.observed.pod is not None:
        return None
    workload = situation.observed.workload
    if workload is None:
        kind = RAY_CLUSTER if situation.session.spec.is_group else STATEFUL_SET
        return found(Reason.CREATING_OBJECTS, f"The {kind} is being created.")
    warning = situation.evidence.latest(workload["metadata"]["uid"], CREATION_EVENTS)
    if warning is not None:
        return why_pods_are_missing(warning.message)
    return preempted(situation.evidence) or why_pods_are_missing(None)


def _terminating_claim(situation: Situation) -> Finding | None:
    if not situation.claim_plan.is_terminating:
        return None
    name = situation.session.claim_name
    return found(Reason.CLAIM_TERMINATING, f"{CLAIM} {name} is being deleted, with all data on its volume.")


def _claim_trouble(situation: Situation, refusal: Finding | None) -> Finding | None:
    session, claim = situation.session, situation.observed.claim
    if (holder := situation.observed.claim_holder) is not None:
        return found(
            Reason.CLAIM_IN_USE,
            f"{CLAIM} {session.claim_name} is in use by session {holder}, and only one worker may write to a volume.",
        )
    if claim is None:
        if session.spec.storage.existing_claim is None:
            return refusal or found(Reason.CREATING_OBJECTS, "The claim of the journal's volume is being created.")
        return found(Reason.CLAIM_MISSING, f"{CLAIM} {session.claim_name} (spec.storage.existingClaim) does not exist.")
    if situation.claim_plan.unused is not None:
        return found(
            Reason.CREATING_OBJECTS, "The claim never had a volume. It is being created again with the new spec."
        )
    if (mismatch := situation.claim_plan.mismatch) is not None:
        return found(Reason.CLAIM_MISMATCH, f"{CLAIM} {session.claim_name} of an earlier session has {mismatch}.")
    return _terminating_claim(situation) if situation.pod is None else None


def _suspension(situation: Situation) -> Finding | None:
    if not situation.is_stopped:
        return None
    if situation.observed.pod is not None or situation.observed.members:
        return found(Reason.SUSPENDING, "The worker saves a snapshot and stops.")
    if any(not pod.has_ended for pod in situation.owned.converters):
        return found(Reason.SUSPENDING, "The Job that converts the model is being stopped.")
    if situation.session.spec.suspend or situation.stop_reason is None:
        return found(Reason.SUSPENDED, "The worker is stopped. Its volume keeps everything.")
    return situation.stop_reason


def _queue(situation: Situation) -> Finding | None:
    live = situation.owned.workload
    if live is None or not live.is_held or not live.is_suspended:
        return None
    return queued(live.manifest)


def _no_groups(situation: Situation) -> Finding | None:
    problem = situation.observed.no_groups
    if problem is None or not situation.session.spec.is_group:
        return None
    return found(Reason.KUBERAY_MISSING, f"A session of several nodes needs a RayCluster. {problem}")


def _upgrade(situation: Situation) -> Finding | None:
    plan = situation.image_plan
    if plan.stop_first:
        return found(
            Reason.UPGRADING,
            f"The worker on {plan.pins.image.reference} stops before {plan.requested} gets the volume.",
        )
    return None


def _refused_image(situation: Situation) -> Finding | None:
    plan = situation.image_plan
    if not plan.gave_up:
        return None
    return found(
        Reason.IMAGE_REFUSED, f"Image {plan.requested} refused the volume twice, and {plan.pins.image.reference} runs."
    )


def _replacement(situation: Situation) -> Finding | None:
    if situation.is_hung:
        return found(
            Reason.WORKER_HUNG, "One operation took longer than the hang timeout, so the operator replaces the worker."
        )
    if situation.restart.must_restart:
        return found(Reason.RESTARTING, "The worker saves a snapshot and restarts with the new spec.")
    return None


def _replay(situation: Situation, finding: Finding) -> Finding:
    """Return the finding that the old image is replaying the journal.

    The finding about the old image says more than the progress of the replay.
    """
    plan = situation.image_plan
    if not plan.replays_on_old_image or finding.reason.progress is not Progress.MOVING:
        return finding
    return found(
        Reason.REPLAYING_ON_OLD_IMAGE,
        f"Image {plan.requested} cannot replay the journal of {plan.pins.image.reference}, "
        "which runs until it has replayed it.",
    )


def why_not_converted(situation: Situation) -> Finding | None:
    """Return why the conversion is not complete, or None if the worker does not wait for the conversion."""
    if not situation.awaits_conversion:
        return None
    job = situation.owned.conversion
    if job is None or job.is_terminating:
        return found(Reason.CREATING_OBJECTS, "The Job that converts the model is being created.")
    if (gave_up := job.failure) is not None:
        words = next((_how_it_ended(each) for each in reversed(job.tries) if each.has_failed), quoted(gave_up))
        return found(Reason.CONVERSION_FAILED, f"{_name(job)} failed too often. Its last try: {words}.")
    return _why_try_not_done(job, situation)


def _why_try_not_done(job: Job, situation: Situation) -> Finding:
    failed = [each for each in job.tries if each.has_failed]
    pod = next((each for each in job.tries if not each.has_ended), None)
    before = _failed_try(job, failed) if failed else None
    if pod is None:
        return before or _why_try_has_no_pod(job, situation)
    if trouble := why_pod_does_not_run(pod, situation.evidence):
        return trouble
    assert pod.running_since is not None
    if before is not None and situation.now < pod.running_since + FRESH_RUN:
        return before
    where = f"{_name(job)} converts the model into the model cache on node {pod.node_name}"
    return found(Reason.CONVERTING_MODEL, f"{where}. The worker starts when the Job is complete.")


def _why_try_has_no_pod(job: Job, situation: Situation) -> Finding:
    if job.is_suspended:
        return queued(job.manifest)
    warning = situation.evidence.latest(job.uid, CREATION_EVENTS)
    return why_pods_are_missing(warning.message if warning is not None else None)


def _failed_try(job: Job, failed: Sequence[Pod]) -> Finding:
    latest = failed[-1]
    record = latest.latest_ending.record if latest.latest_ending is not None else None
    reason = WORKER_REASONS.get(record.reason) if record is not None else None
    what = (
        f"Try {len(failed)} of {_name(job)} failed, and the Job tries again. The failed try: {_how_it_ended(latest)}."
    )
    return found_by_worker(reason or Reason.CONVERTING_MODEL, what, is_quoted=latest.is_vouched_for)


def _how_it_ended(pod: Pod) -> str:
    ending = pod.latest_ending
    if ending is None:
        return f"pod {pod.name} was removed from outside"
    if ending.out_of_memory and ending.record is None:
        return "it was killed because it used more memory than spec.resources gives to each pod of the session"
    words = ending.last_words
    if words is None:
        return f"it ended with status {ending.exit_code}; {log_hint(pod)}"
    return words if ending.record is not None else f"it ended with status {ending.exit_code} and said: {words}"


def _name(job: Job) -> str:
    return f"Job {job.name}"


def why_not_pulled(situation: Situation) -> Finding | None:
    """Return why the new image is not pulled yet, or None if the worker does not wait for an image."""
    plan, job = situation.image_plan, situation.owned.image_pull
    if plan.pulls_on is None:
        return None
    runs = f"Meanwhile the worker runs {plan.pins.image.reference}"
    pulling = found(Reason.PULLING_IMAGE, f"Node {plan.pulls_on} pulls {plan.requested}. {runs}.")
    if job is None or job.is_terminating or not pulls_image(job, plan.requested, plan.pulls_on):
        return pulling
    if job.failure is not None:
        failed = f"Job {job.name} with {plan.requested} failed on node {plan.pulls_on}: {_why_pull_failed(job)}"
        cure = "Name an image that runs, or delete the Job to try again"
        return Finding(Reason.CANNOT_START, f"{failed}. {runs}. {cure}.")
    trouble = _pull_trouble(job, situation)
    if trouble is None or trouble.reason in (Reason.PREPARING_POD, Reason.CREATING_OBJECTS):
        return pulling
    return Finding(trouble.reason, f"{trouble.message} {runs}.")


def _why_pull_failed(job: Job) -> str:
    """Return the node's message if the node ended the pod, for example because the node's disk is full."""
    latest = next((each for each in reversed(job.tries) if each.has_failed), None)
    if latest is None or not latest.status_reason:
        return "the image was pulled, but it does not run Python"
    return quoted(": ".join(part for part in (latest.status_reason, latest.status_message) if part))


def _pull_trouble(job: Job, situation: Situation) -> Finding | None:
    pod = next((each for each in reversed(job.tries) if not each.has_ended), None)
    if pod is not None:
        return why_pod_does_not_run(pod, situation.evidence)
    if job.is_suspended:
        return queued(job.manifest)
    warning = situation.evidence.latest(job.uid, CREATION_EVENTS)
    return why_pods_are_missing(warning.message) if warning is not None else None
