"""Pods are drained through the eviction API, by the real one and its controller of budgets."""

from __future__ import annotations

from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.kube.resources import BUDGETS, PODS, SESSIONS

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"


async def evict(hands: KubectlUser, pod: str) -> None:
    metadata = {"name": pod, "namespace": hands.namespace}
    await hands.post_to(PODS, pod, "eviction", {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})


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
