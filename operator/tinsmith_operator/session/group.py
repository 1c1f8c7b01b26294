"""The pods of a session with several nodes.

The pods form one group. The pods of a group start together and end together.

When a rank is lost, the worker process ends, and the worker's container restarts in the same pod. The restart of the
container begins a new run of the group. The operator replaces the members of the earlier run, because such members have
lost the head and their results. The head's pod and the restart count of its container identify a run, and the status
names the members of the run. The operator compares no clocks to identify a run.
"""

from __future__ import annotations

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.api.status import GroupRun
from tinsmith_operator.common.actions import Delete
from tinsmith_operator.common.diagnosis import (
    found,
    why_pod_is_not_ready,
    why_pods_are_missing,
)
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.session.situation import Situation

LEFT_BEHIND_GRACE_SECONDS = 5
"""The grace period for members of an earlier run.

The period is short, because nothing waits for members of an earlier run.
"""


def stop_left_behind(situation: Situation) -> tuple[Delete, ...]:
    """Stop the members of an earlier run."""
    why = "its run of the group has ended"
    return tuple(
        Delete("Pod", member.name, member.uid, why, LEFT_BEHIND_GRACE_SECONDS)
        for member in left_behind(situation)
        if not member.is_terminating
    )


def left_behind(situation: Situation) -> tuple[Pod, ...]:
    before = situation.session.status.group
    if before is None or situation.pod is None or _is_run_of(before, situation.pod):
        return ()
    return tuple(member for member in situation.members if member.uid in before.members)


def group_run(situation: Situation) -> GroupRun | None:
    """Return the run to record in the status. A new run is recorded only when no member of the earlier run is left."""
    before, head = situation.session.status.group, situation.pod
    if not situation.session.spec.is_group or head is None or left_behind(situation):
        return before
    members = tuple(sorted(member.uid for member in situation.members))
    return GroupRun(head=head.uid, restarts=head.restarts, members=members)


def waiting_for_members(situation: Situation) -> Finding | None:
    """Return the pods for which the head waits, and the reason. Return None if all members run."""
    nodes = situation.session.spec.divided.nodes
    running = [member for member in situation.members if member.is_ready]
    if len(running) == nodes - 1:
        return None
    count = f"{len(running) + 1} of {nodes} pods are running"
    if trouble := _trouble_of_a_member(situation):
        return Finding(trouble.reason, f"{count}. {trouble.message}")
    return found(Reason.WAITING_FOR_MEMBERS, f"{count}. The model is loaded when all of them run.")


def _trouble_of_a_member(situation: Situation) -> Finding | None:
    findings = [why_pod_is_not_ready(member, situation.evidence) for member in situation.members if not member.is_ready]
    if situation.observed.workload is not None:
        uid = situation.observed.workload["metadata"]["uid"]
        if warning := situation.evidence.latest(uid, CREATION_EVENTS):
            findings.append(why_pods_are_missing(warning.message))
    return next((finding for finding in findings if _is_more_specific(finding.reason)), None)


def _is_more_specific(reason: Reason) -> bool:
    """Return whether the reason says more about a pod than the fact that the pod is starting."""
    return reason.progress is Progress.STUCK or reason is Reason.UNSCHEDULABLE


def _is_run_of(run: GroupRun, head: Pod) -> bool:
    return (run.head, run.restarts) == (head.uid, head.restarts)
