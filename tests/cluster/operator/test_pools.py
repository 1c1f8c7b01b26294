"""A pool's life, as the cluster sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.operator.test_others import RESTARTED, rests
from cluster.operator.test_repair import spec_of, spec_of_manifest
from support.kubernetes.api_proxy import ApiProxy
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    IMAGE,
    comes_to_rest,
    condition_of,
    eventually,
    pool_manifest,
    running,
    settings_for,
)
from tinsmith_operator.kube.resources import BUDGETS, DEPLOYMENTS, PODS, POLICIES, POOLS, SECRETS, SERVICES, Resource

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"
EXAMPLES = Path(__file__).parents[3] / "examples"
AUTOSCALERS = Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SLICES = Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")

CHILD = "tiny-sampler"
OWNED = {
    "deployment": (CHILD, DEPLOYMENTS),
    "service": (CHILD, SERVICES),
    "policy": (CHILD, POLICIES),
    "budget": (CHILD, BUDGETS),
    "certificate": (f"{CHILD}-tls", SECRETS),
}


async def is_ready(hands: KubectlUser) -> Any:
    return await comes_to_rest(hands, "ReplicasReady", resource=POOLS)


async def uids(hands: KubectlUser) -> set[str]:
    """Of the pods that are not on their way out."""
    return {pod["metadata"]["uid"] for pod in await hands.all(PODS) if "deletionTimestamp" not in pod["metadata"]}


async def test_a_pool_gets_its_children_and_becomes_ready(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest(replicas=2))
        ready = await is_ready(hands)
    for name, resource in OWNED.values():
        child = await hands.get(resource, name)
        assert child is not None
        [owner] = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (ready["metadata"]["uid"], True)
    numbers = {name: ready["status"][name] for name in ("replicas", "readyReplicas", "updatedReplicas")}
    assert numbers == {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2}


async def test_its_endpoints_can_be_found_by_the_name_of_the_pool(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)

        async def slices() -> list[dict[str, Any]]:
            return [each["metadata"]["labels"] for each in await hands.all(SLICES)]

        [labels] = await eventually(slices, "the endpoints are there")
    assert (labels["tinsmith.dev/pool"], labels["kubernetes.io/service-name"]) == ("tiny", CHILD)


@pytest.mark.parametrize("child", OWNED)
async def test_a_child_of_a_pool_that_is_deleted_comes_back(hands: KubectlUser, kubelet: Kubelet, child: str) -> None:
    name, resource = OWNED[child]
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        before = await hands.get(resource, name)
        assert before is not None
        await hands.delete(resource, name)

        async def is_back() -> bool:
            live = await hands.get(resource, name)
            return live is not None and live["metadata"]["uid"] != before["metadata"]["uid"]

        await eventually(is_back, f"the {child} is back")
        await is_ready(hands)


Look = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[str, Resource, dict[str, Any], Look]] = {
    "replicas": (CHILD, DEPLOYMENTS, {"spec": {"replicas": 3}}, lambda live: live["spec"]["replicas"]),
    "template": (
        CHILD,
        DEPLOYMENTS,
        {"spec": {"template": {"spec": {"nodeSelector": {"disk": "slow"}, "terminationGracePeriodSeconds": 1}}}},
        lambda live: (
            live["spec"]["template"]["spec"].get("nodeSelector"),
            live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        ),
    ),
    "strategy": (
        CHILD,
        DEPLOYMENTS,
        {"spec": {"strategy": {"rollingUpdate": {"maxUnavailable": 1}}}},
        lambda live: live["spec"]["strategy"],
    ),
    "selector": (CHILD, SERVICES, {"spec": {"selector": {"of": "mine"}}}, lambda live: live["spec"]["selector"]),
    "ingress": (CHILD, POLICIES, {"spec": {"ingress": [{}]}}, lambda live: live["spec"]["ingress"]),
    "budget": (CHILD, BUDGETS, {"spec": {"maxUnavailable": 7}}, lambda live: live["spec"]["maxUnavailable"]),
}


@pytest.mark.parametrize("edit", EDITS)
async def test_a_child_of_a_pool_that_is_edited_becomes_what_it_was(
    hands: KubectlUser, kubelet: Kubelet, edit: str
) -> None:
    name, resource, patch, look = EDITS[edit]
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        before = await hands.get(resource, name)
        assert before is not None
        assert look(await hands.patch(resource, name, patch)) != look(before)

        async def is_mended() -> bool:
            live = await hands.get(resource, name)
            return live is not None and look(live) == look(before)

        await eventually(is_mended, f"{edit} is as it was")
        await is_ready(hands)


@pytest.mark.parametrize("child", ["deployment", "budget"])
async def test_a_foreign_object_is_not_touched_for_a_pool(hands: KubectlUser, kubelet: Kubelet, child: str) -> None:
    name, resource = OWNED[child]
    labels = {"of": "somebody-else"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "example.invalid/c:1"}]}}
    specs = {
        "deployment": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
        "budget": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }
    head = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name, "labels": labels}}
    foreign = await hands.create(resource, {**head, "spec": specs[child]})
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await comes_to_rest(hands, "NameConflict", resource=POOLS)
        # A Deployment's controller marks what it has seen; nothing else may be different.
        (kept, spec, _), (kept_before, spec_before, _) = (
            await spec_of(hands, resource, name),
            spec_of_manifest(foreign),
        )
        assert (kept["uid"], kept["labels"], spec) == (kept_before["uid"], labels, spec_before)
        await hands.delete(resource, name)
        await is_ready(hands)


async def test_a_pool_is_scaled_by_its_subresource_and_keeps_the_pods_that_stay(
    hands: KubectlUser, kubelet: Kubelet, api_cluster: Cluster
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        [first] = await uids(hands)
        api_cluster.kubectl(f"--namespace={hands.namespace}", "scale", "spool/tiny", "--replicas=3")
        scaled = await is_ready(hands)
        assert first in await uids(hands)
        assert scaled["status"]["readyReplicas"] == 3
        api_cluster.kubectl(f"--namespace={hands.namespace}", "scale", "spool/tiny", "--replicas=0")
        await comes_to_rest(hands, "ScaledToZero", resource=POOLS)
        assert await uids(hands) == set()


async def test_an_autoscaler_finds_what_it_scales(hands: KubectlUser, kubelet: Kubelet) -> None:
    autoscaler = yaml.safe_load((EXAMPLES / "sampler-pool-autoscaler.yaml").read_text())
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        await hands.create(AUTOSCALERS, autoscaler)

        async def has_found() -> bool:
            """It looks every 15 s, and has no metrics to go by here."""
            live = await hands.get(AUTOSCALERS, "tiny")
            able = condition_of(live, "AbleToScale")
            return (able.get("status"), able.get("reason")) == ("True", "SucceededGetScale")

        await eventually(has_found, "the autoscaler has read the scale of the pool")


async def test_another_image_rolls_the_pods_and_none_is_missing_meanwhile(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest(replicas=2))
        await is_ready(hands)
        watching = asyncio.create_task(fewest_ready(hands))
        await hands.patch(POOLS, "tiny", {"spec": {"pod": {"image": NEW_IMAGE}}})
        rolled = await is_ready(hands)
        watching.cancel()
        fewest = await watching
    images = {pod["spec"]["containers"][0]["image"] for pod in await hands.all(PODS)}
    assert (images, rolled["status"]["image"], fewest) == ({NEW_IMAGE}, NEW_IMAGE, 2)


async def fewest_ready(hands: KubectlUser) -> int:
    """Until it is cancelled."""
    fewest = 1000
    try:
        while True:
            live = await hands.get(DEPLOYMENTS, CHILD)
            fewest = min(fewest, (live or {}).get("status", {}).get("readyReplicas", 0))
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        return fewest


async def test_an_installation_with_another_default_image_restarts_no_replica_until_somebody_asks(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        before = await uids(hands)
    async with running(settings_for(hands.namespace, trainer_image=NEW_IMAGE)):

        async def says_so() -> bool:
            return condition_of(await hands.get(POOLS, "tiny"), "UpgradeAvailable")["status"] == "True"

        await eventually(says_so, "the image that waits is told")
        assert (await is_ready(hands))["status"]["image"] == IMAGE
        assert await uids(hands) == before
        asked = {"metadata": {"annotations": {"tinsmith.dev/restart-requested-at": "2026-01-31T12:00:00Z"}}}
        await hands.patch(POOLS, "tiny", asked)

        async def is_done() -> bool:
            status = (await hands.get(POOLS, "tiny") or {})["status"]
            return bool(status.get("requests") == {"restart": "2026-01-31T12:00:00Z"})

        await eventually(is_done, "the restart is done")
        assert (await is_ready(hands))["status"]["image"] == NEW_IMAGE
        assert not before & await uids(hands)


async def test_a_restart_by_kubectl_is_undone_and_the_operator_comes_to_rest(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        marks = {"metadata": {"annotations": {RESTARTED: "2026-01-01T00:00:00Z"}}}
        await hands.patch(DEPLOYMENTS, CHILD, {"spec": {"template": marks}})

        async def is_undone() -> bool:
            live = await hands.get(DEPLOYMENTS, CHILD)
            return live is not None and RESTARTED not in json.dumps(live["spec"])

        await eventually(is_undone, "the template is ours again")
        await is_ready(hands)
        await rests(proxy)


async def test_a_deleted_pool_leaves_nothing(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest(replicas=2))
        ready = await is_ready(hands)
        assert "finalizers" not in ready["metadata"]
        await hands.delete(POOLS, "tiny")

        async def gone() -> bool:
            left = [await hands.get(resource, name) for name, resource in OWNED.values()]
            return left == [None] * len(left) and await hands.all(PODS) == []

        await eventually(gone, "everything of the pool is gone")
