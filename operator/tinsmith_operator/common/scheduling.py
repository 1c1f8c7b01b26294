"""What the scheduler says when no node takes a pod."""

from __future__ import annotations

import re

from tinsmith_operator.api.reasons import Reason

_NODES = re.compile(r"^0/(\d+) nodes are available")
# Kubernetes up to 1.33 says the first, later versions the second.
_VOLUME_ELSEWHERE = re.compile(
    r"(\d+) node\(s\) (?:had volume node affinity conflict|didn't match PersistentVolume's node)"
)
_UNNAMED_TAINTS = re.compile(r"(\d+) node\(s\) had untolerated taint\(s\)")
"""As of 1.34 the scheduler does not say which."""
_LOST_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.kubernetes.io/out-of-service")


def reason_of(message: str) -> Reason:
    if re.search(r'persistentvolumeclaim "[^"]*" not found', message):
        return Reason.CLAIM_MISSING
    if re.search(r'persistentvolumeclaim "[^"]*" is being deleted', message):
        return Reason.CLAIM_TERMINATING
    if "unbound immediate PersistentVolumeClaims" in message:
        return Reason.CLAIM_UNBOUND
    if _is_volume_on_lost_node(message):
        return Reason.VOLUME_ON_LOST_NODE
    return Reason.UNSCHEDULABLE


def _is_volume_on_lost_node(message: str) -> bool:
    """The volume belongs to another node than all that are there, or than all that a taint does not keep from it."""
    elsewhere, nodes = _VOLUME_ELSEWHERE.search(message), _NODES.search(message)
    if elsewhere is None or nodes is None:
        return False
    if any(taint in message for taint in _LOST_TAINTS):
        return True
    tainted = _UNNAMED_TAINTS.search(message)
    return int(elsewhere[1]) + (int(tainted[1]) if tainted else 0) == int(nodes[1])
