"""Pods are drained through the eviction API, by the real one and its controller of budgets."""

from __future__ import annotations

from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlError, KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    pool_manifest,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.kube.resources import BUDGETS, PODS, POOLS, SESSIONS

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"
REFUSED = 429


async def evict(hands: KubectlUser, pod: str) -> None:
    metadata = {"name": pod, "namespace": hands.namespace}
    await hands.post_to(PODS, pod, "eviction", {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})


async def samplers(hands: KubectlUser) -> list[dict[str, Any]]:
    pods = [pod for pod in await hands.all(PODS) if pod["metadata"]["labels"].get("tinsmith.dev/pool") == "tiny"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


async def test_a_worker_may_be_evicted_at_any_time_and_comes_back_on_the_image_that_it_ran(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        assert await hands.all(BUDGETS) == [], "one for a single pod would only forbid the drain"
    before = await hands.get(PODS, "tiny-0")
    assert before is not None
    async with running(settings_for(hands.namespace, trainer_image=NEW_IMAGE)):
        await evict(hands, "tiny-0")

        async def is_back() -> bool:
            now = await hands.get(PODS, "tiny-0")
            return now is not None and now["metadata"]["uid"] != before["metadata"]["uid"]

        await eventually(is_back, "its next pod is there")
        await eventually(lambda: offers_an_upgrade(hands), "it says that there is another image")
        await comes_to_rest(hands, "WorkerReady")
        after = await hands.get(PODS, "tiny-0")
    assert after is not None
    arguments = {image for image in after["spec"]["containers"][0]["args"] if image.startswith("--image=")}
    assert arguments == {image for image in before["spec"]["containers"][0]["args"] if image.startswith("--image=")}


async def offers_an_upgrade(hands: KubectlUser) -> bool:
    return bool(condition_of(await hands.get(SESSIONS, "tiny"), "UpgradeAvailable")["status"] == "True")


@pytest.mark.timeout(300)
async def test_of_a_pool_one_replica_at_a_time_may_be_evicted(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(POOLS, pool_manifest(replicas=2))
        await comes_to_rest(hands, "ReplicasReady", resource=POOLS)

        async def allowed() -> bool:
            [budget] = await hands.all(BUDGETS)
            return (budget.get("status") or {}).get("disruptionsAllowed") == 1

        await eventually(allowed, "the budget lets one go")
        first, second = [pod["metadata"]["name"] for pod in await samplers(hands)]
        kubelet.idle = True
        await evict(hands, first)
        with pytest.raises(KubectlError) as refusal:
            await evict(hands, second)
        assert refusal.value.status == REFUSED
        kubelet.idle = False
        await eventually(allowed, "the first one's successor serves")
        await evict(hands, second)
        await comes_to_rest(hands, "ReplicasReady", resource=POOLS)
