"""Why the session is not ready: one reason, and one sentence with the cure.

Each function looks at one thing, and finds nothing or the matter. The first that finds something wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinsmith_operator.api.conditions import ConditionType, Finding
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.common import diagnosis as common
from tinsmith_operator.common.diagnosis import (
    CLAIM,
    found,
    made_room,
    queued,
    why_pod_is_not_ready,
    why_pods_are_missing,
)
from tinsmith_operator.common.pod import Pod, node_is_silent
from tinsmith_operator.common.workloads import RAY_CLUSTER, STATEFUL_SET
from tinsmith_operator.session.group import waiting_for_members
from tinsmith_operator.session.jobs import why_not_converted, why_not_pulled
from tinsmith_operator.session.situation import Situation, claim_mismatch


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a session, each thing looked for once.

    trouble: why it is not ready, or will not stay so; None of one that is and does.
    """

    is_ready: bool
    trouble: Finding | None
    refusal: Finding | None
    ca_problem: Finding | None
    lost_node: Finding | None
    terminating_claim: Finding | None
    full_volume: Finding | None
    refused_image: Finding | None
    image_pull: Finding | None


def diagnose(situation: Situation) -> Diagnosis:
    """Ready: the worker serves, and it is ours alone that answers under its name, from behind its policy and on its
    volume."""
    observed, pod, plan = situation.observed, situation.pod, situation.image_plan
    conflict = common.name_conflict(situation.session, situation.owned.foreign)
    refusal, ca_problem = common.refusal(observed), common.ca_problem(observed)
    lost, terminating, refused_image = lost_node(situation), _terminating_claim(situation), _refused_image(situation)
    is_ready = observed.claim_holder is None and pod is not None and pod.is_ready and conflict is None
    stops = (
        situation.bar is not None
        or situation.session.spec.suspend
        or plan.stop_first
        or situation.must_restart
        or situation.is_hung
    )
    trouble = None if is_ready and not stops else situation.bar or conflict or lost or _why_not_ready(situation)
    return Diagnosis(
        is_ready=is_ready,
        trouble=trouble,
        refusal=refusal,
        ca_problem=ca_problem,
        lost_node=lost,
        terminating_claim=terminating,
        full_volume=_full_volume(situation),
        refused_image=refused_image,
        image_pull=why_not_pulled(situation),
    )


def _full_volume(situation: Situation) -> Finding | None:
    """As last reported of this volume: a worker that has only just started has the same one."""
    report, said = situation.report, situation.session.status.condition(ConditionType.DEGRADED)
    was_full = said is not None and said.reason == Reason.VOLUME_FULL and situation.pod is not None
    if not (report.volume_full if report is not None else was_full):
        return None
    return found(Reason.VOLUME_FULL, "The journal's volume is full: the worker accepts no training, and programs wait.")


def _why_not_ready(situation: Situation) -> Finding:
    """Of a session whose pod is not ready, or must not be used."""
    looks: tuple[Callable[[Situation], Finding | None], ...] = (
        _claim_trouble,
        _suspension,
        _no_groups,
        _upgrade,
        _refusal,
        _missing_certificate,
        why_not_converted,
        _queue,
        _missing_pod,
        _replacement,
    )
    finding = next((finding for look in looks if (finding := look(situation))), None)
    return finding or _replay(situation, _why_pods_are_not_ready(situation))


def _why_pods_are_not_ready(situation: Situation) -> Finding:
    """The worker's own trouble first: while it has none it waits for the others."""
    finding = why_pod_is_not_ready(situation.pod, situation.evidence)
    if not situation.session.spec.is_group or finding.reason is not Reason.LOADING_MODEL:
        return finding
    return waiting_for_members(situation) or finding


def lost_node(situation: Situation) -> Finding | None:
    pods = (*([situation.pod] if situation.pod is not None else []), *situation.members, *_awaited(situation))
    pod = next((pod for pod in pods if node_is_silent(pod, situation.now)), None)
    if pod is None:
        return None
    return found(
        Reason.NODE_UNREACHABLE,
        f"Node {pod.node_name} does not answer for pod {pod.name}, which may still run, so no other is started.",
    )


def _converting(situation: Situation) -> list[Pod]:
    return [pod for pod in situation.converters if not pod.has_ended]


def _awaited(situation: Situation) -> list[Pod]:
    """Those of the Job that the session waits for. What one before it left behind holds up nothing."""
    job = situation.conversion
    if job is None or not situation.awaits_conversion:
        return []
    return [pod for pod in job.tries if not pod.has_ended]


def _refusal(situation: Situation) -> Finding | None:
    return common.refusal(situation.observed)


def _missing_certificate(situation: Situation) -> Finding | None:
    return common.missing_certificate(situation.observed)


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
    return made_room(situation.evidence) or why_pods_are_missing(None)


def _terminating_claim(situation: Situation) -> Finding | None:
    if not situation.claim_is_terminating:
        return None
    name = situation.session.claim_name
    return found(Reason.CLAIM_TERMINATING, f"{CLAIM} {name} is being deleted, and with it everything on the volume.")


def _claim_trouble(situation: Situation) -> Finding | None:
    session, claim = situation.session, situation.observed.claim
    if (holder := situation.observed.claim_holder) is not None:
        return found(
            Reason.CLAIM_IN_USE,
            f"{CLAIM} {session.claim_name} is in use by session {holder}: one worker writes to a volume.",
        )
    if claim is None:
        if session.spec.storage.existing_claim is None:
            return _refusal(situation) or found(Reason.CREATING_OBJECTS, "The volume's claim is being created.")
        return found(Reason.CLAIM_MISSING, f"{CLAIM} {session.claim_name} (spec.storage.existingClaim) is not there.")
    if situation.unused_claim is not None:
        return found(Reason.CREATING_OBJECTS, "The claim never had a volume, and is made anew as the spec says now.")
    if situation.owned.claim is not None and (mismatch := claim_mismatch(session, claim)):
        return found(Reason.CLAIM_MISMATCH, f"{CLAIM} {session.claim_name} from before has {mismatch}.")
    return _terminating_claim(situation) if situation.pod is None else None


def _suspension(situation: Situation) -> Finding | None:
    if not situation.session.spec.suspend:
        return None
    if situation.observed.pod is not None or situation.observed.members:
        return found(Reason.SUSPENDING, "The worker takes a snapshot and stops.")
    if _converting(situation):
        return found(Reason.SUSPENDING, "The conversion of the model stops.")
    return found(Reason.SUSPENDED, "The worker is stopped, and its volume keeps everything.")


def _queue(situation: Situation) -> Finding | None:
    live = situation.owned.workload
    if live is None or not live.is_held or not live.is_suspended:
        return None
    return queued(live.manifest)


def _no_groups(situation: Situation) -> Finding | None:
    problem = situation.observed.no_groups
    if problem is None or not situation.session.spec.is_group:
        return None
    return found(Reason.KUBERAY_MISSING, f"A session of several nodes is a RayCluster. {problem}")


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
    return found(Reason.IMAGE_REFUSED, f"{plan.requested} refused the volume twice; {plan.pins.image.reference} runs.")


def _replacement(situation: Situation) -> Finding | None:
    if situation.is_hung:
        return found(Reason.WORKER_HUNG, "One operation ran longer than the hang timeout, so the worker is replaced.")
    if situation.must_restart:
        return found(Reason.RESTARTING, "The worker stops with a snapshot, to start as the spec says now.")
    return None


def _replay(situation: Situation, finding: Finding) -> Finding:
    """While the old image makes its way, that it does so says more than how far it has come."""
    plan = situation.image_plan
    if not plan.replays_on_old_image or finding.reason.progress is not Progress.MOVING:
        return finding
    return found(
        Reason.REPLAYING_ON_OLD_IMAGE,
        f"{plan.requested} cannot replay what ran on {plan.pins.image.reference}, which therefore runs once more.",
    )
