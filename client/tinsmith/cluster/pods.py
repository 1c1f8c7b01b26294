"""What a pod says of itself, in words."""

from __future__ import annotations

from datetime import datetime

from tinsmith.cluster.manifests import Manifest, ago, moment


def container_statuses(pod: Manifest) -> list[Manifest]:
    """Of init containers first, in the order in which they start."""
    status = pod.get("status") or {}
    found: list[Manifest] = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return found


def restarts_of(pod: Manifest) -> int:
    return sum(container.get("restartCount", 0) for container in container_statuses(pod))


def is_ready(pod: Manifest) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


def state_of(pod: Manifest) -> str:
    """The column STATUS of kubectl, and whether it is ready."""
    if pod["metadata"].get("deletionTimestamp"):
        return "stopping"
    waiting = [container["state"]["waiting"] for container in container_statuses(pod) if _waits(container)]
    if waiting:
        return str(waiting[0].get("reason", "waiting"))
    phase = str((pod.get("status") or {}).get("phase", "unknown"))
    return f"{phase}, ready" if is_ready(pod) else f"{phase}, not ready"


def describe_state(container: Manifest, now: datetime) -> str:
    """What the container does now."""
    state = container.get("state") or {}
    if "waiting" in state:
        return _because("waiting", state["waiting"])
    if "terminated" in state:
        return describe_ending(state["terminated"], now)
    if "running" in state:
        started = moment(state["running"].get("startedAt"))
        return f"running, started {ago(started, now)}"
    return "not started"


def describe_ending(ending: Manifest, now: datetime) -> str:
    how = f"ended {ago(moment(ending.get('finishedAt')), now)} with status {ending.get('exitCode', 'unknown')}"
    return _because(how, ending)


def _waits(container: Manifest) -> bool:
    return "waiting" in (container.get("state") or {})


def _because(what: str, state: Manifest) -> str:
    said = ": ".join(" ".join(part.split()) for part in (state.get("reason"), state.get("message")) if part)
    return f"{what}, {said}" if said else what
