"""A pool's life, as the cluster sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    pool_manifest,
    running,
    settings_for,
)
from tinsmith_operator.kube.resources import BUDGETS, DEPLOYMENTS, PODS, POLICIES, POOLS, SECRETS, SERVICES, Resource

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
    """Return the UIDs of the pods that do not terminate."""
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


async def test_an_autoscaler_finds_its_target(hands: KubectlUser, kubelet: Kubelet) -> None:
    autoscaler = yaml.safe_load((EXAMPLES / "sampler-pool-autoscaler.yaml").read_text())
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest())
        await is_ready(hands)
        await hands.create(AUTOSCALERS, autoscaler)

        async def has_found() -> bool:
            """Wait until it has looked, which it does every 15 s, without metrics here."""
            live = await hands.get(AUTOSCALERS, "tiny")
            able = condition_of(live, "AbleToScale")
            return (able.get("status"), able.get("reason")) == ("True", "SucceededGetScale")

        await eventually(has_found, "the autoscaler has read the scale of the pool")
