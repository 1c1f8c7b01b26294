"""Whether a pod's node has gone silent. The operator may not read nodes, and need not: the pod tells."""

from __future__ import annotations

from datetime import datetime, timedelta

from tinsmith_operator.decide.pod import Pod

OVERDUE_AFTER = timedelta(seconds=60)
"""Beyond its grace period: a kubelet that is there ends a pod within seconds of it."""


def node_is_silent(pod: Pod, now: datetime) -> bool:
    return _was_marked_by_node_controller(pod) or is_overdue(pod, now)


def _was_marked_by_node_controller(pod: Pod) -> bool:
    """It sets Ready to False and touches nothing else; a kubelet moves both conditions together."""
    return pod.condition("Ready").get("status") == "False" and pod.condition("ContainersReady").get("status") == "True"


def is_overdue(pod: Pod, now: datetime) -> bool:
    return pod.deletion_time is not None and now > overdue_time(pod.deletion_time)


def overdue_time(deletion_time: datetime) -> datetime:
    return deletion_time + OVERDUE_AFTER
