"""The repair of deleted or changed children. Objects of other owners are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    eventually,
    pool_manifest,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.kube.resources import (
    CLAIMS,
    DEPLOYMENTS,
    POLICIES,
    POOLS,
    SECRETS,
    SERVICES,
    SESSIONS,
    WORKLOADS,
    Resource,
)

OWNED = {
    "workload": ("tiny", WORKLOADS),
    "service": ("tiny", SERVICES),
    "policy": ("tiny", POLICIES),
    "certificate": ("tiny-tls", SECRETS),
}
LABEL = "app.kubernetes.io/managed-by"

Look = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[str, Resource, dict[str, Any], Look]] = {
    "replicas": ("tiny", WORKLOADS, {"spec": {"replicas": 3}}, lambda live: live["spec"]["replicas"]),
    "arguments": (
        "tiny",
        WORKLOADS,
        {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}},
        lambda live: live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
    ),
    "port": ("tiny", SERVICES, {"spec": {"ports": [{"name": "rpc", "port": 1}]}}, lambda live: live["spec"]["ports"]),
    "selector": ("tiny", SERVICES, {"spec": {"selector": {"of": "mine"}}}, lambda live: live["spec"]["selector"]),
    "ingress": ("tiny", POLICIES, {"spec": {"ingress": [{}]}}, lambda live: live["spec"]["ingress"]),
    "authority": ("tiny-tls", SECRETS, {"data": {"ca.crt": "eA=="}}, lambda live: live["data"]["ca.crt"]),
    "label": ("tiny", POLICIES, {"metadata": {"labels": {LABEL: None}}}, lambda live: live["metadata"]["labels"]),
    "label of a Secret": (
        "tiny-tls",
        SECRETS,
        {"metadata": {"labels": {LABEL: None}}},
        lambda live: live["metadata"]["labels"],
    ),
    "label of the claim": (
        "tiny-journal",
        CLAIMS,
        {"metadata": {"labels": {"app.kubernetes.io/component": "of-another-program"}}},
        lambda live: live["metadata"]["labels"],
    ),
}


@pytest.mark.parametrize("child", OWNED)
async def test_a_child_that_is_deleted_comes_back(hands: KubectlUser, kubelet: Kubelet, child: str) -> None:
    name, resource = OWNED[child]
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        before = await hands.get(resource, name)
        assert before is not None
        await hands.delete(resource, name)

        async def is_back() -> bool:
            live = await hands.get(resource, name)
            return live is not None and live["metadata"]["uid"] != before["metadata"]["uid"]

        await eventually(is_back, f"the {child} is back")
        await comes_to_rest(hands, "WorkerReady")


@pytest.mark.parametrize("edit", EDITS)
async def test_an_edited_child_is_reverted(hands: KubectlUser, kubelet: Kubelet, edit: str) -> None:
    name, resource, patch, look = EDITS[edit]
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        before = await hands.get(resource, name)
        assert before is not None
        edited = await hands.patch(resource, name, patch)
        if edit != "authority":
            assert look(edited) != look(before)

        async def is_mended() -> bool:
            live = await hands.get(resource, name)
            return live is not None and look(live) == look(before)

        await eventually(is_mended, f"{edit} is as it was")


async def test_a_field_that_a_session_no_longer_asks_for_leaves_the_pod(hands: KubectlUser, kubelet: Kubelet) -> None:
    """The object was created by POST, and later changed by apply: both must be undone by leaving a field out."""
    pod = {"nodeSelector": {"disk": "fast"}, "priorityClassName": "system-node-critical"}
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest(pod=pod))
        await comes_to_rest(hands, "WorkerReady")
        for left, patch in [({"zone": "a"}, {"zone": "a", "disk": None}), (None, None)]:
            await hands.patch(SESSIONS, "tiny", {"spec": {"pod": {"nodeSelector": patch}}})
            await comes_to_rest(hands, "WorkerReady")
            workload = await hands.get(WORKLOADS, "tiny")
            assert workload is not None
            assert workload["spec"]["template"]["spec"].get("nodeSelector") == left


@pytest.mark.parametrize("child", OWNED)
async def test_a_foreign_object_is_never_touched_and_the_session_says_so(
    hands: KubectlUser, kubelet: Kubelet, child: str
) -> None:
    name, resource = OWNED[child]
    foreign = await hands.create(resource, foreign_object(resource, name))
    async with running(settings_for(hands.namespace)) as operator:
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "NameConflict")
        assert await spec_of(hands, resource, name) == spec_of_manifest(foreign)
        assert operator is not None
        await hands.delete(resource, name)
        # A Secret without our label is not watched: it is looked at again after a minute.
        if resource is not SECRETS:
            await comes_to_rest(hands, "WorkerReady")


def foreign_object(resource: Resource, name: str) -> dict[str, Any]:
    """Create an object of another owner under a name that the operator would use."""
    labels = {"of": "another-owner"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "example.invalid/c:1"}]}}
    specs: dict[str, dict[str, Any]] = {
        "StatefulSet": {
            "spec": {"replicas": 0, "serviceName": "x", "selector": {"matchLabels": labels}, "template": template}
        },
        "Service": {"spec": {"ports": [{"port": 80}], "selector": labels}},
        "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": labels}}},
        "Secret": {"data": {"mine": "eA=="}},
    }
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name, "labels": labels},
        **specs[resource.kind],
    }


async def spec_of(hands: KubectlUser, resource: Resource, name: str) -> Any:
    live = await hands.get(resource, name)
    assert live is not None
    return spec_of_manifest(live)


def spec_of_manifest(manifest: dict[str, Any]) -> Any:
    metadata = manifest["metadata"]
    kept = {name: metadata.get(name) for name in ("uid", "labels", "annotations", "ownerReferences")}
    return kept, manifest.get("spec"), manifest.get("data")


QUOTA = Resource("v1", "ResourceQuota", "resourcequotas")
FAILURES = 20
"""The number of refusals after which a controller waits 17 minutes for its next try."""


async def test_refused_pods_come_soon_after_a_quota_is_raised(
    hands: KubectlUser, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controllers of sessions and pools would not try again for a quarter of an hour."""
    for room in ("session", "pool"):
        monkeypatch.setattr(f"tinsmith_operator.{room}.decision.LOOK_FOR_WARNINGS", timedelta(seconds=1))
    monkeypatch.setattr("tinsmith_operator.kube.events.WARNINGS_SECONDS", 1.0)
    monkeypatch.setattr("tinsmith_operator.common.requeue.SHORTEST_PAUSE", timedelta(seconds=2))
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    await hands.create(QUOTA, quota)
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await hands.create(POOLS, pool_manifest("many"))
        await comes_to_rest(hands, "QuotaExceeded")
        await comes_to_rest(hands, "QuotaExceeded", "many", resource=POOLS)
        for failure in range(FAILURES):
            touch = {"metadata": {"annotations": {"example.com/failures": str(failure)}}}
            await hands.patch(WORKLOADS, "tiny", touch)
            await hands.patch(DEPLOYMENTS, "many-sampler", touch)
            await asyncio.sleep(0.2)
        await hands.patch(QUOTA, "few", {"spec": {"hard": {"pods": "9"}}})
        await comes_to_rest(hands, "WorkerReady", seconds=60)
        await comes_to_rest(hands, "ReplicasReady", "many", seconds=60, resource=POOLS)
