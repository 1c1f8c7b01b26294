"""Changes by other writers around a session: the operator comes to rest, without a tug of war."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.api_proxy import ApiProxy
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    WAIT_SECONDS,
    comes_to_rest,
    eventually,
    pool_manifest,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.build.pod import POD_SECURITY, SECURITY
from tinsmith_operator.kube.resources import (
    CLAIMS,
    DEPLOYMENTS,
    PODS,
    POOLS,
    SECRETS,
    SERVICES,
    SESSIONS,
    WORKLOADS,
    Resource,
)

WRITES = ("create", "patch", "update", "delete")
RESTARTED = "kubectl.kubernetes.io/restartedAt"


async def rests(proxy: ApiProxy) -> None:
    """Wait for three seconds without a write. Raises AssertionError when the operator keeps writing."""
    ends_at = time.monotonic() + WAIT_SECONDS
    while True:
        before = writes(proxy)
        await asyncio.sleep(3)
        latest = writes(proxy)[len(before) :]
        if not latest:
            return
        assert time.monotonic() < ends_at, latest


def writes(proxy: ApiProxy) -> list[Any]:
    return [call for call in proxy.calls if call.verb in WRITES and call.resource != "leases"]


ODD_NODES = {
    "nodeSelectorTerms": [
        {"matchExpressions": [{"key": "gpu", "operator": "Exists", "values": []}], "matchFields": []},
        {"matchExpressions": []},
    ]
}
ODD_PODS = {
    "topologyKey": "zone",
    "labelSelector": {"matchLabels": {}, "matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]},
    "namespaces": [],
    "namespaceSelector": {},
    "matchLabelKeys": [],
}
ODD_POD = {
    "labels": {"empty": ""},
    "annotations": {"empty": "", "wide": "\u00fc\u2028\U0001f600"},
    "nodeSelector": {"empty": ""},
    "env": [
        {"name": "EMPTY", "value": ""},
        {"name": "NOTHING"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b", "optional": False}}},
        {"name": "SETTING", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b", "optional": True}}},
        {"name": "DOLLARS", "value": "$(HOME) $$ \\ \n"},
    ],
    "tolerations": [
        {"key": "", "operator": "Exists", "value": "", "effect": "NoExecute", "tolerationSeconds": 0},
        {"key": "a"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": -5},
    ],
    "imagePullSecrets": [{"name": "a"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": ODD_NODES,
            "preferredDuringSchedulingIgnoredDuringExecution": [],
        },
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [ODD_PODS]},
        "podAntiAffinity": {},
    },
    "sharedMemory": "1.00000000001Gi",
}
AMOUNTS = ("0.3333", "1.00001", "100n", "1e-9", "1500u", "1E1", "+2", "2.", ".5", "0000.1")
SIZES = ("1.0000001Gi", "1e9", "1000000000000m", "0.5Gi", "1073741824", 1073741824)


def odd_resources(index: int) -> dict[str, Any]:
    """Quantities that the API server writes otherwise, or rounds."""
    memory = SIZES[index % len(SIZES)]
    return {"requests": {"cpu": AMOUNTS[index], "memory": memory}, "limits": {"memory": memory}}


async def test_a_value_that_the_api_server_stores_differently_is_no_difference(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    """Neither while an operator runs, nor when the next one starts."""
    names = [f"odd-{index}" for index in range(len(AMOUNTS))]
    for index, name in enumerate(names):
        storage = {"size": f"{index + 1}.0000000001Gi", "accessMode": "ReadWriteOnce"}
        spec = {"pod": ODD_POD, "resources": odd_resources(index), "storage": storage}
        await hands.create(SESSIONS, session_manifest(name, **spec))
    await hands.create(POOLS, pool_manifest("odd", pod=ODD_POD, resources=odd_resources(0)))
    async with running(settings_for(hands.namespace)):
        for name in names:
            await comes_to_rest(hands, "WorkerReady", name)
        await comes_to_rest(hands, "ReplicasReady", "odd", resource=POOLS)
        await rests(proxy)
    before = len(writes(proxy))
    async with running(settings_for(hands.namespace)):
        # It looks at those that are there before it looks at a new one.
        await hands.create(SESSIONS, session_manifest("last"))
        await comes_to_rest(hands, "WorkerReady", "last")
    assert [call for call in writes(proxy)[before:] if "last" not in (call.name or "last")] == []


async def annotate_everything(hands: KubectlUser) -> None:
    """Annotate everything, as a cloud's controllers, injectors and people do."""
    marks = {"metadata": {"annotations": {"example.com/seen": "yes"}, "labels": {"example.com/team": "a"}}}
    for resource, name in [(WORKLOADS, "tiny"), (CLAIMS, "tiny-journal"), (SECRETS, "tiny-tls"), (PODS, "tiny-0")]:
        await hands.patch(resource, name, marks)
    await hands.patch(CLAIMS, "tiny-journal", {"metadata": {"finalizers": ["example.com/held"]}})


async def restart_by_kubectl(hands: KubectlUser) -> None:
    marks = {"metadata": {"annotations": {RESTARTED: "2026-01-01T00:00:00Z"}}}
    await hands.patch(WORKLOADS, "tiny", {"spec": {"template": marks}})

    async def is_undone() -> bool:
        live = await hands.get(WORKLOADS, "tiny")
        return live is not None and RESTARTED not in json.dumps(live["spec"])

    await eventually(is_undone, "the template is ours again")


async def add_a_condition(hands: KubectlUser) -> None:
    session = await hands.get(SESSIONS, "tiny")
    assert session is not None
    foreign_condition = {**session["status"]["conditions"][0], "type": "example.com/Approved"}
    del foreign_condition["observedGeneration"]
    conditions = [foreign_condition, *reversed(session["status"]["conditions"])]
    await hands.patch(SESSIONS, "tiny", {"status": {"conditions": conditions}}, subresource="status")


@pytest.mark.parametrize("others", [annotate_everything, restart_by_kubectl, add_a_condition])
async def test_the_operator_settles_with_other_controllers_and_the_pod_stays(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy, others: Callable[[KubectlUser], Awaitable[None]]
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        before = await hands.get(PODS, "tiny-0")
        await others(hands)
        await rests(proxy)
        after = await hands.get(PODS, "tiny-0")
    assert before is not None
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    if others is annotate_everything:
        await hands.patch(CLAIMS, "tiny-journal", {"metadata": {"finalizers": None}})


@pytest.mark.parametrize(
    "wrong",
    [[], [{"matchExpressions": [{"key": "gpu", "operator": "Exists", "values": ["1"]}]}]],
    ids=["no terms", "a value for none"],
)
@pytest.mark.parametrize("is_new", [True, False], ids=["of a new session", "of one that runs"])
async def test_an_invalid_affinity_is_reported_and_leaves_no_trace_after_its_removal(
    hands: KubectlUser, kubelet: Kubelet, wrong: list[dict[str, Any]], is_new: bool
) -> None:
    """The CRD cannot check its meaning; its fields and their types are refused before there is a session."""
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": wrong}}}
    async with running(settings_for(hands.namespace)):
        if is_new:
            await hands.create(SESSIONS, session_manifest(pod={"affinity": affinity}))
        else:
            await hands.create(SESSIONS, session_manifest())
            await comes_to_rest(hands, "WorkerReady")
            await hands.patch(SESSIONS, "tiny", {"spec": {"pod": {"affinity": affinity}}})
        await eventually(lambda: is_stalled(hands, "OverridesRefused"), "the refusal is reported")
        await hands.patch(SESSIONS, "tiny", {"spec": {"pod": {"affinity": None}}})
        await comes_to_rest(hands, "WorkerReady")


@pytest.mark.parametrize("is_there_first", [True, False], ids=["is there first", "comes later"])
async def test_managed_fields_beyond_the_depth_of_a_parser_stop_no_session(
    hands: KubectlUser, kubelet: Kubelet, api_cluster: Cluster, tmp_path: Path, is_there_first: bool
) -> None:
    """Anybody may write them into an object of theirs, and the API server keeps them to a depth of 10,000."""
    deep = tmp_path / "deep.json"
    nested = '{"f:a":' * 9000 + "{}" + "}" * 9000
    managed = {"manager": "me", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": "nested"}

    def write(resource: Resource, manifest: dict[str, Any]) -> None:
        metadata = {"name": "deep", "managedFields": [{**managed, "apiVersion": resource.api_version}]}
        deep.write_text(json.dumps({**manifest, "metadata": metadata}).replace('"nested"', nested))
        api_cluster.kubectl("create", "--raw", resource.path(hands.namespace), f"--filename={deep}")

    def write_both() -> None:
        write(SERVICES, {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}})
        write(SESSIONS, session_manifest())

    if is_there_first:
        await asyncio.to_thread(write_both)
    async with running(settings_for(hands.namespace)):
        if not is_there_first:
            await hands.create(SESSIONS, session_manifest("early"))
            await comes_to_rest(hands, "WorkerReady", "early")
            await asyncio.to_thread(write_both)
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")


@pytest.mark.parametrize("resources", [["statefulsets"], ["pods"]], ids=str)
async def test_an_admission_webhook_without_an_answer_is_reported_until_it_is_removed(
    hands: KubectlUser, kubelet: Kubelet, api_cluster: Cluster, resources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_operator.session.decision.LOOK_FOR_WARNINGS", timedelta(seconds=1))
    monkeypatch.setattr("tinsmith_operator.kube.events.WARNINGS_SECONDS", 1.0)
    monkeypatch.setattr("tinsmith_operator.common.requeue.SHORTEST_PAUSE", timedelta(seconds=2))
    name = f"{hands.namespace}-{resources[0]}"
    rule = {"operations": ["CREATE"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": resources}
    webhook = {
        "name": "down.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": hands.namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [webhook],
    }
    api_cluster.kubectl("apply", "--filename=-", stdin=json.dumps(configuration))
    try:
        async with running(settings_for(hands.namespace)):
            await hands.create(SESSIONS, session_manifest())
            await eventually(lambda: is_stalled(hands, "WebhookUnreachable"), "the webhook is reported")
            api_cluster.kubectl("delete", "validatingwebhookconfigurations", name)
            await comes_to_rest(hands, "WorkerReady")
    finally:
        api_cluster.kubectl("delete", "validatingwebhookconfigurations", name, "--ignore-not-found")


def reading(claim: str) -> dict[str, Any]:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": claim}}
    return {"model": {"name": "tiny/model", "source": source}}


async def test_a_mount_of_anothers_journal_is_refused_and_the_worker_of_that_journal_stays(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest("victim"))
        await comes_to_rest(hands, "WorkerReady", name="victim")
        before = await hands.get(WORKLOADS, "victim"), await hands.get(PODS, "victim-0")
        thief, pool = session_manifest("thief"), pool_manifest("thief")
        for resource, manifest in ((SESSIONS, thief), (POOLS, pool)):
            manifest["spec"] |= reading("victim-journal")
            await hands.create(resource, manifest)
            await comes_to_rest(hands, "ClaimIsJournal", name="thief", resource=resource)
        volumes = [{"name": "journal", "persistentVolumeClaim": {"claimName": "victim-journal"}}]
        container = {"name": "worker", "image": "busybox", "securityContext": SECURITY}
        labels = {"app.kubernetes.io/managed-by": "tinsmith-operator", "tinsmith.dev/session": "thief"}
        stranger = {"metadata": {"name": "stranger", "labels": labels}, "spec": {"containers": [container]}}
        stranger["spec"] |= {"volumes": volumes, "securityContext": POD_SECURITY}
        await hands.create(PODS, {"apiVersion": "v1", "kind": "Pod", **stranger})
        await hands.patch(SESSIONS, "victim", {"metadata": {"annotations": {"example.com/look": "again"}}})
        await rests(proxy)
        assert await hands.get(WORKLOADS, "thief") is None
        assert await hands.get(DEPLOYMENTS, "thief-sampler") is None
        after = await hands.get(WORKLOADS, "victim"), await hands.get(PODS, "victim-0")
        for one, other in zip(before, after, strict=True):
            assert one is not None
            assert other is not None
            assert one["metadata"]["uid"] == other["metadata"]["uid"]
            assert "deletionTimestamp" not in other["metadata"]
        await hands.delete(SESSIONS, "victim")
        # Without another request, because the claim is no journal any more.
        await comes_to_rest(hands, "WorkerReady", name="thief")
        await comes_to_rest(hands, "ReplicasReady", name="thief", resource=POOLS)


async def test_a_namespace_with_retained_volumes_goes_without_the_operators_help(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    """Its operator goes in the same breath, so nothing in it may wait for one."""
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
    for resource in (SESSIONS, CLAIMS, SECRETS, WORKLOADS):
        for manifest in await hands.all(resource):
            marks = [mark for mark in manifest["metadata"].get("finalizers", []) if "tinsmith" in mark]
            assert marks == [], manifest["metadata"]["name"]


async def is_stalled(hands: KubectlUser, reason: str) -> bool:
    session = await hands.get(SESSIONS, "tiny")
    assert session is not None
    conditions = (session.get("status") or {}).get("conditions", [])
    return any((each["type"], each["status"], each["reason"]) == ("Stalled", "True", reason) for each in conditions)
