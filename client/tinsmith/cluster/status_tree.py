"""`kubectl tinsmith status`: families as a tree for people, and as JSON for scripts. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from tinsmith.cluster.families import Family, Kind, effective_spec
from tinsmith.cluster.health import Health, is_outdated, judge, upgrade_hint
from tinsmith.cluster.manifests import (
    Manifest,
    ago,
    conditions_of,
    is_ready,
    moment,
    name_of,
    reference_to,
    restarts_of,
    span,
    state_of,
)
from tinsmith.console import Branch

STYLES = {
    Health.STUCK: "bold red",
    Health.UNSEEN: "bold red",
    Health.DEGRADED: "yellow",
    Health.MOVING: "yellow",
    Health.RESTING: "dim",
    Health.WELL: "green",
}


def most_urgent_first(families: Iterable[Family]) -> list[Family]:
    return sorted(families, key=lambda family: (judge(family).health, family.namespace, family.name, family.kind.word))


def status_tree(families: Iterable[Family], now: datetime, *, with_namespaces: bool = False) -> list[Branch]:
    """Return a tree for each family. The family with the most urgent state comes first."""
    return [_family(family, now, with_namespaces) for family in most_urgent_first(families)]


def _family(family: Family, now: datetime, with_namespace: bool) -> Branch:
    verdict = judge(family)
    where = f" in {family.namespace}" if with_namespace else ""
    return Branch(
        f"{family.kind.word}/{family.name}{where}, {verdict.headline}",
        tuple(_parts(family, now)),
        STYLES[verdict.health],
    )


def _parts(family: Family, now: datetime) -> Iterator[Branch]:
    verdict = judge(family)
    if verdict.health is not Health.WELL:
        yield Branch(verdict.message, style=STYLES[verdict.health])
    if is_outdated(family):
        yield Branch("the spec has changed; the operator has not processed it yet", style="yellow")
    if (upgrade := upgrade_hint(family)) is not None:
        yield Branch(upgrade.message, style="cyan")
    if conditions := conditions_line(family.owner):
        yield Branch(conditions)
    yield Branch(_facts(family, now))
    yield from _children(family, now)


def conditions_line(owner: Manifest) -> str:
    """Return the true conditions with reasons, and the names of the conditions that are not true."""
    found = conditions_of(owner).values()
    holding = [f"{condition.type} {condition.reason}" for condition in found if condition.holds]
    words_of_status = {"False": "not", "Unknown": "unknown:"}
    groups = [
        f"{word} " + ", ".join(condition.type for condition in found if condition.status == status)
        for status, word in words_of_status.items()
        if any(condition.status == status for condition in found)
    ]
    return "; ".join([", ".join(holding), *groups] if holding else groups)


def _facts(family: Family, now: datetime) -> str:
    spec, status = effective_spec(family.owner), family.owner.get("status") or {}
    facts = [f"{_model(spec)} on {status.get('engine') or spec.get('engine', 'peft')}"]
    if template := spec.get("templateRef"):
        facts.append(f"template {template['name']}")
    if family.kind is Kind.POOL:
        facts.append(f"{status.get('readyReplicas', 0)} of {spec.get('replicas', 1)} replicas ready")
    if adapters := status.get("adapters"):
        facts.append(f"adapters {adapters['summary']}")
    facts += _progress(status.get("progress") or {}, now)
    if snapshot := moment(status.get("lastSnapshotTime")):
        facts.append(f"last snapshot {ago(snapshot, now)}")
    if endpoint := status.get("endpoint"):
        facts.append(f"endpoint {endpoint}")
    if (expiry := moment(status.get("certificateExpiryTime"))) is not None:
        facts.append(_certificate(expiry, now))
    return ", ".join(facts)


def _progress(progress: Manifest, now: datetime) -> Iterator[str]:
    if (step := progress.get("step")) is not None:
        yield f"step {step}"
    if (rate := progress.get("tokensPerSecond")) is not None:
        yield f"{rate} tokens/s"
    if activity := moment(progress.get("lastActivityTime")):
        yield f"last activity {ago(activity, now)}"


def _model(spec: Manifest) -> str:
    """Return the name of the model. A session that waits for its template has no model yet."""
    return str((spec.get("model") or {}).get("name", "unknown model"))


def _certificate(expiry: datetime, now: datetime) -> str:
    left = (expiry - now).total_seconds()
    return f"certificate ends in {span(left)}" if left > 0 else f"certificate ended {span(-left)} ago"


def _children(family: Family, now: datetime) -> Iterator[Branch]:
    if (workload := family.workload) is not None:
        ready, desired = _replicas(family, workload)
        yield Branch(f"{reference_to(workload)}, {ready} of {desired} ready")
    for pod in family.pods:
        yield Branch(_pod(pod, now))
    if family.claim is not None:
        yield Branch(_claim(family.claim))


def _replicas(family: Family, workload: Manifest) -> tuple[int, int]:
    """Return the numbers of ready and desired pods. The status of a RayCluster does not count the head's pod."""
    spec = workload["spec"]
    if workload["kind"] != "RayCluster":
        return (workload.get("status") or {}).get("readyReplicas", 0), spec.get("replicas", 1)
    desired = 1 + sum(group["replicas"] for group in spec["workerGroupSpecs"])
    return sum(map(is_ready, family.pods)), 0 if spec.get("suspend") else desired


def _pod(pod: Manifest, now: datetime) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    made = moment(pod["metadata"].get("creationTimestamp"))
    parts = [
        f"{reference_to(pod)} on {node}" if node else f"{reference_to(pod)} on no node",
        state_of(pod),
        _restarts(restarts_of(pod)),
        f"made {ago(made, now)}",
    ]
    return ", ".join(parts)


def _restarts(count: int) -> str:
    return "1 restart" if count == 1 else f"{count} restarts"


def _claim(claim: Manifest) -> str:
    status = claim.get("status") or {}
    requested = claim["spec"]["resources"]["requests"]["storage"]
    size = (status.get("capacity") or {}).get("storage", requested)
    growing = f", growing to {requested}" if size != requested else ""
    return f"{reference_to(claim)}, {status.get('phase', 'unknown')}, {size}{growing}"


def as_json(families: Iterable[Family]) -> list[dict[str, Any]]:
    """Return the facts in the tree as JSON values for scripts, in the same order."""
    return [_json(family) for family in most_urgent_first(families)]


def _json(family: Family) -> dict[str, Any]:
    verdict = judge(family)
    status = family.owner.get("status") or {}
    return {
        "kind": family.kind.kind,
        "namespace": family.namespace,
        "name": family.name,
        "health": verdict.health.name.lower(),
        "ready": verdict.ready,
        "reason": verdict.reason,
        "message": verdict.message,
        "upgradeAvailable": upgrade_hint(family) is not None,
        "model": _model(effective_spec(family.owner)),
        "endpoint": status.get("endpoint"),
        "certificateExpiryTime": status.get("certificateExpiryTime"),
        "adapters": status.get("adapters"),
        "progress": status.get("progress"),
        "lastSnapshotTime": status.get("lastSnapshotTime"),
        "conditions": status.get("conditions", []),
        "pods": [_pod_json(pod) for pod in family.pods],
        "claim": name_of(family.claim) if family.claim is not None else None,
    }


def _pod_json(pod: Manifest) -> dict[str, Any]:
    node = (pod.get("spec") or {}).get("nodeName")
    return {"name": name_of(pod), "node": node, "state": state_of(pod), "restarts": restarts_of(pod)}
