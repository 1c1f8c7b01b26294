"""Functions that read values from Kubernetes objects in kubectl's JSON output."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Manifest = dict[str, Any]

UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a status. `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str
    since: datetime | None

    @property
    def holds(self) -> bool:
        return self.status == "True"


def conditions_of(manifest: Manifest) -> dict[str, Condition]:
    """Return a dictionary of the conditions by type, in the same order as in the object."""
    listed = (manifest.get("status") or {}).get("conditions") or []
    return {found["type"]: _condition(found) for found in listed}


def _condition(found: Manifest) -> Condition:
    return Condition(
        type=found["type"],
        status=found.get("status", "Unknown"),
        reason=found.get("reason") or "",
        message=found.get("message") or "",
        since=moment(found.get("lastTransitionTime")),
    )


def name_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def namespace_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("namespace", ""))


def uid_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("uid", ""))


def label_of(manifest: Manifest, label: str) -> str | None:
    return (manifest["metadata"].get("labels") or {}).get(label)


def reference_to(manifest: Manifest) -> str:
    """Return the kind and name of the object in kubectl's notation: `pod/qwen-0`."""
    return f"{manifest['kind'].lower()}/{name_of(manifest)}"


def moment(text: str | None) -> datetime | None:
    """Parse a time from the API. A time without a zone is in UTC."""
    if not text:
        return None
    read = datetime.fromisoformat(text)
    return read if read.tzinfo is not None else read.replace(tzinfo=UTC)


def span(seconds: float) -> str:
    """Return a duration in the largest unit that fits, for example `1m` for 90."""
    for size, unit in UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def ago(since: datetime | None, now: datetime) -> str:
    return f"{span((now - since).total_seconds())} ago" if since is not None else "at an unknown time"


def container_statuses(pod: Manifest) -> list[Manifest]:
    """Return the container statuses in the order in which the containers start. Init containers come first."""
    status = pod.get("status") or {}
    found: list[Manifest] = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return found


def restarts_of(pod: Manifest) -> int:
    return sum(container.get("restartCount", 0) for container in container_statuses(pod))


def is_ready(pod: Manifest) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


def state_of(pod: Manifest) -> str:
    """Return the state that kubectl shows in the column STATUS, and whether the pod is ready."""
    if pod["metadata"].get("deletionTimestamp"):
        return "stopping"
    waiting = [container["state"]["waiting"] for container in container_statuses(pod) if _waits(container)]
    if waiting:
        return str(waiting[0].get("reason", "waiting"))
    phase = str((pod.get("status") or {}).get("phase", "unknown"))
    return f"{phase}, ready" if is_ready(pod) else f"{phase}, not ready"


def describe_state(container: Manifest, now: datetime) -> str:
    """Return the container's current state in words."""
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


def _because(state_name: str, state: Manifest) -> str:
    details = ": ".join(" ".join(part.split()) for part in (state.get("reason"), state.get("message")) if part)
    return f"{state_name}, {details}" if details else state_name
