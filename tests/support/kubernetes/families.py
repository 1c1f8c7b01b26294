"""Sessions and pools with their children, as kubectl would print them, for tests of `kubectl tinsmith`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

Manifest = dict[str, Any]

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NAMESPACE = "research"
SOURCE = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models"}}


def time_ago(**span: float) -> str:
    return (NOW - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(type_: str, status: str, reason: str, message: str = "") -> Manifest:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message or f"{reason} is so.",
        "lastTransitionTime": time_ago(minutes=4),
        "observedGeneration": 1,
    }


def ready(message: str = "The worker serves Qwen/Qwen3-8B.") -> list[Manifest]:
    return [
        condition("Ready", "True", "WorkerReady", message),
        condition("Reconciling", "False", "AsWanted"),
        condition("Stalled", "False", "AsWanted"),
        condition("SlotsAvailable", "True", "SlotsFree"),
        condition("Degraded", "False", "AsExpected"),
    ]


def unready(reason: str, message: str = "", *, stalled: bool = False, moving: bool = False) -> list[Manifest]:
    return [
        condition("Ready", "False", reason, message),
        condition("Reconciling", str(moving), reason, message),
        condition("Stalled", str(stalled), reason, message),
        condition("SlotsAvailable", "Unknown", "NotReported"),
        condition("Degraded", "False", "AsExpected"),
    ]


def owner(kind: str, name: str, conditions: list[Manifest] | None, spec: Manifest, status: Manifest) -> Manifest:
    said = {"observedGeneration": 1, "conditions": conditions, **status} if conditions is not None else None
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"{kind}-{name}", "generation": 1},
        "spec": {"model": {"name": "Qwen/Qwen3-8B", "source": SOURCE}, **spec},
        **({"status": said} if said is not None else {}),
    }


def session(name: str = "qwen", conditions: list[Manifest] | None = None, **status: Any) -> Manifest:
    return owner("TrainingSession", name, conditions, {"engine": "peft", "storage": {"size": "10Gi"}}, status)


def pool(name: str = "draws", conditions: list[Manifest] | None = None, replicas: int = 2, **status: Any) -> Manifest:
    return owner("SamplerPool", name, conditions, {"engine": "builtin", "replicas": replicas}, status)


def child(kind: str, name: str, *, of: Manifest, **content: Any) -> Manifest:
    word = {"TrainingSession": "session", "SamplerPool": "pool"}[of["kind"]]
    labels = {"app.kubernetes.io/managed-by": "tinsmith-operator", f"tinsmith.dev/{word}": of["metadata"]["name"]}
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"{kind}-{name}", "labels": labels}
    return {"kind": kind, "metadata": {**metadata, "creationTimestamp": time_ago(hours=2)}, **content}


def pod(
    name: str,
    *,
    of: Manifest,
    node: str | None = "node-1",
    is_ready: bool = True,
    uid: str | None = None,
    **status: Any,
) -> Manifest:
    """Further arguments are fields of its container's status."""
    container = {"name": "worker", "ready": is_ready, "restartCount": 0, "state": {"running": {}}, **status}
    conditions = [{"type": "Ready", "status": str(is_ready), "lastTransitionTime": time_ago(hours=1)}]
    made = child("Pod", name, of=of, spec={"nodeName": node} if node else {})
    made["status"] = {"phase": "Running" if node else "Pending", "conditions": conditions}
    if node:
        made["status"]["containerStatuses"] = [container]
    if uid is not None:
        made["metadata"]["uid"] = uid
    return made


def workload(of: Manifest, *, desired: int = 1, are_ready: int = 1) -> Manifest:
    kind, name = {
        "TrainingSession": ("StatefulSet", of["metadata"]["name"]),
        "SamplerPool": ("Deployment", f"{of['metadata']['name']}-sampler"),
    }[of["kind"]]
    return child(kind, name, of=of, spec={"replicas": desired}, status={"readyReplicas": are_ready})


def claim(of: Manifest, *, phase: str = "Bound", size: str = "10Gi", desired: str | None = None) -> Manifest:
    spec = {"resources": {"requests": {"storage": desired or size}}, "storageClassName": "fast"}
    capacity = {"capacity": {"storage": size}} if phase == "Bound" else {}
    name = f"{of['metadata']['name']}-journal"
    return child("PersistentVolumeClaim", name, of=of, spec=spec, status={"phase": phase, **capacity})


def event(
    about: Manifest, reason: str, message: str, *, count: int = 1, type_: str = "Warning", **ago: float
) -> Manifest:
    metadata = about["metadata"]
    return {
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{reason}", "namespace": NAMESPACE},
        "involvedObject": {
            "kind": about["kind"],
            "namespace": NAMESPACE,
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": type_,
        "reason": reason,
        "message": message,
        "count": count,
        "lastTimestamp": time_ago(**ago),
    }
