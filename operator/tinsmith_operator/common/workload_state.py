"""What a session's StatefulSet or RayCluster says of its pods, alike for both."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest

STATEFUL_SET = "StatefulSet"
RAY_CLUSTER = "RayCluster"
WORKLOAD_KINDS = frozenset({STATEFUL_SET, RAY_CLUSTER})


def template_of(workload: Manifest) -> Manifest:
    """Of the worker's pod."""
    spec = workload["spec"]
    template: Manifest = spec["headGroupSpec"]["template"] if workload["kind"] == RAY_CLUSTER else spec["template"]
    return template


def wants_pods(workload: Manifest) -> bool:
    spec = workload["spec"]
    if workload["kind"] == RAY_CLUSTER:
        return not spec.get("suspend", False)
    return bool(spec.get("replicas") != 0)


def is_known(workload: Manifest) -> bool:
    """Whether its controller has seen this version of it. Before, it could start the next pod from the old template.

    KubeRay does not tell; a pod that it starts from an old template is replaced once more.
    """
    if workload["kind"] == RAY_CLUSTER:
        return True
    seen = (workload.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= workload["metadata"].get("generation", 0))


def has_stopped(workload: Manifest) -> bool:
    """Whether its controller has understood that there shall be no pod, and sees none."""
    if wants_pods(workload):
        return False
    status = workload.get("status") or {}
    if workload["kind"] == RAY_CLUSTER:
        # KubeRay takes this back before it makes the next pod.
        return any(
            (condition["type"], condition["status"]) == ("RayClusterSuspended", "True")
            for condition in status.get("conditions") or ()
        )
    return is_known(workload) and not status.get("replicas")
