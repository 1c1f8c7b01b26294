"""A session's life, as the cluster sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import IMAGE, comes_to_rest, eventually, running, session_manifest, settings_for
from tinsmith_operator.kube.resources import CLAIMS, EVENTS, PODS, POLICIES, SECRETS, SERVICES, SESSIONS, WORKLOADS

OWNED = (("tiny", WORKLOADS), ("tiny", SERVICES), ("tiny", POLICIES), ("tiny-tls", SECRETS))


async def test_a_session_gets_its_children_and_becomes_ready(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        ready = await comes_to_rest(hands, "WorkerReady")
    claim = await hands.get(CLAIMS, "tiny-journal")
    assert claim is not None
    assert "ownerReferences" not in claim["metadata"]
    assert ready["status"]["workerId"] == claim["metadata"]["uid"]
    for name, resource in OWNED:
        child = await hands.get(resource, name)
        assert child is not None
        [owner] = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (ready["metadata"]["uid"], True)


async def test_suspending_takes_the_pod_and_keeps_the_volume_and_resuming_brings_it_back(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        first = await comes_to_rest(hands, "WorkerReady")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        await comes_to_rest(hands, "Suspended")
        assert await hands.all(PODS) == []
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": False}})
        second = await comes_to_rest(hands, "WorkerReady")
    assert second["status"]["workerId"] == first["status"]["workerId"]


async def test_another_image_gets_the_volume_after_the_old_worker_has_gone(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    other = "tinsmith.local/tinsmith/trainer:0.2.0"
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        [before] = await hands.all(PODS)
        await hands.patch(SESSIONS, "tiny", {"spec": {"pod": {"image": other}}})
        upgraded = await comes_to_rest(hands, "WorkerReady")
    [after] = await hands.all(PODS)
    assert before["spec"]["containers"][0]["image"] == IMAGE
    assert after["spec"]["containers"][0]["image"] == other
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert upgraded["status"]["image"] == other


async def test_more_slots_restart_the_worker_once(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        [before] = await hands.all(PODS)
        await hands.patch(SESSIONS, "tiny", {"spec": {"adapters": {"slots": 16}}})

        async def restarted() -> bool:
            pods = await hands.all(PODS)
            return bool(pods) and pods[0]["metadata"]["uid"] != before["metadata"]["uid"]

        await eventually(restarted, "another pod")
        await comes_to_rest(hands, "WorkerReady")
    [pod] = await hands.all(PODS)
    assert "--adapter-slots=16" in pod["spec"]["containers"][0]["args"]


async def test_a_deleted_session_leaves_its_volume_and_the_same_one_again_is_the_same_worker(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        first = await comes_to_rest(hands, "WorkerReady")
        assert "finalizers" not in first["metadata"]
        await hands.delete(SESSIONS, "tiny")

        async def gone() -> bool:
            left = [await hands.get(resource, name) for name, resource in (*OWNED, ("tiny-0", PODS))]
            return left == [None] * len(left)

        await eventually(gone, "the children are gone")
        await hands.create(SESSIONS, session_manifest())
        again = await comes_to_rest(hands, "WorkerReady")
    assert again["status"]["workerId"] == first["status"]["workerId"]


async def test_with_delete_the_volume_goes_after_the_worker(hands: KubectlUser, kubelet: Kubelet) -> None:
    storage: dict[str, Any] = {"retentionPolicy": {"whenDeleted": "Delete"}}
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest(storage=storage))
        ready = await comes_to_rest(hands, "WorkerReady")
        assert ready["metadata"]["finalizers"] == ["tinsmith.dev/claim"]
        await hands.delete(SESSIONS, "tiny")

        async def gone() -> bool:
            return await hands.get(SESSIONS, "tiny") is None

        await eventually(gone, "the session is gone")

        async def claim_goes() -> bool:
            claim = await hands.get(CLAIMS, "tiny-journal")
            return claim is None or "deletionTimestamp" in claim["metadata"]

        await eventually(claim_goes, "the claim goes")
    assert await hands.all(PODS) == []


async def test_events_of_a_session_that_is_suspended_and_resumed_are_counted_not_repeated(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        for _ in range(2):
            for suspend, reason in ((True, "Suspended"), (False, "WorkerReady")):
                await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": suspend}})
                await comes_to_rest(hands, reason)

        async def counts() -> dict[str, list[int]]:
            ours = [event for event in await hands.all(EVENTS) if event["involvedObject"]["kind"] == "TrainingSession"]
            reasons = {event["reason"] for event in ours}
            return {reason: [each["count"] for each in ours if each["reason"] == reason] for reason in reasons}

        await eventually(lambda: _has(counts, "WorkerReady", [3]), "one Event says three times that it is ready")
        assert (await counts())["Suspended"] == [2]


async def _has(counts: Callable[[], Awaitable[dict[str, list[int]]]], reason: str, wanted: list[int]) -> bool:
    return (await counts()).get(reason) == wanted


async def test_a_claim_that_gets_no_volume_is_made_anew_as_the_spec_is_corrected(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    wrong, right = {"storageClassName": "fats", "size": "999Ti"}, {"storageClassName": "fast", "size": "10Gi"}
    kubelet.idle = True
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest(storage=wrong))
        await eventually(lambda: hands.get(PODS, "tiny-0"), "the pod waits for its volume")
        before = await hands.get(CLAIMS, "tiny-journal")
        await hands.patch(SESSIONS, "tiny", {"spec": {"storage": right}})

        async def is_made_anew() -> bool:
            claim = await hands.get(CLAIMS, "tiny-journal")
            return claim is not None and claim["metadata"]["uid"] != (before or {})["metadata"]["uid"]

        await eventually(is_made_anew, "another claim")
        kubelet.idle = False
        ready = await comes_to_rest(hands, "WorkerReady")
        claim = await hands.get(CLAIMS, "tiny-journal")
    assert claim is not None
    assert claim["spec"]["storageClassName"] == "fast"
    assert ready["status"]["workerId"] == claim["metadata"]["uid"]


@pytest.mark.parametrize("whose", ["tls", "worker"])
async def test_a_certificate_that_is_spoiled_is_issued_anew(hands: KubectlUser, kubelet: Kubelet, whose: str) -> None:
    name = {"tls": "tinsmith-api-server-tls", "worker": "tiny-tls"}[whose]
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        await hands.patch(SECRETS, name, {"data": {"tls.crt": "c3BvaWxlZA=="}})

        async def mended() -> bool:
            secret = await hands.get(SECRETS, name)
            return secret is not None and secret["data"]["tls.crt"] != "c3BvaWxlZA=="

        await eventually(mended, "the Secret holds a certificate again")
