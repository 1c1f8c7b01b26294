"""A session's life, as the cluster sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    content_worker,
    eventually,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.common.observed import ModelStep, WorkerReport
from tinsmith_operator.kube.resources import CLAIMS, EVENTS, PODS, POLICIES, SECRETS, SERVICES, SESSIONS, WORKLOADS
from tinsmith_operator.runtime.worker_client import Target

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


class TrainingWorker:
    """A worker that makes a step between two reports."""

    def __init__(self) -> None:
        self.step = 0
        self.adapters_used = 1

    async def describe(self, target: Target) -> WorkerReport:
        self.step += 1
        models = (ModelStep("a", self.step),)
        report = replace(await content_worker(target), models=models, trained_tokens=1000 * self.step)
        return replace(report, adapters_used=self.adapters_used)


async def test_the_progress_and_the_other_status_are_written_apart(hands: KubectlUser, kubelet: Kubelet) -> None:
    """Neither of the two writes removes what the other has written."""
    worker = TrainingWorker()

    async def status_with(adapters_used: int, step: int) -> Any:
        session = await hands.get(SESSIONS, "tiny")
        status = (session or {}).get("status") or {}
        shown = (status.get("adapters", {}).get("used"), status.get("progress", {}).get("step", 0) >= step)
        return session if shown == (adapters_used, True) else None

    async with running(settings_for(hands.namespace), describe=worker.describe):
        await hands.create(SESSIONS, session_manifest())
        await eventually(lambda: status_with(1, 2), "the progress is written")
        worker.adapters_used = 2
        await eventually(lambda: status_with(2, 2), "the other status is written, and the progress stays")
        later = worker.step + 1
        session = await eventually(lambda: status_with(2, later), "the progress grows, and the other status stays")
        assert session["status"]["progress"]["tokensPerSecond"] > 0
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        suspended = await comes_to_rest(hands, "Suspended")
    owned = {
        entry["manager"]: set(entry["fieldsV1"]["f:status"])
        for entry in suspended["metadata"]["managedFields"]
        if entry.get("subresource") == "status"
    }
    assert owned["tinsmith-operator-progress"] == {"f:progress"}
    assert "f:progress" not in owned["tinsmith-operator"]
    assert suspended["status"]["progress"]["step"] >= later


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
            session_events = [
                event for event in await hands.all(EVENTS) if event["involvedObject"]["kind"] == "TrainingSession"
            ]
            reasons = {event["reason"] for event in session_events}
            return {
                reason: [each["count"] for each in session_events if each["reason"] == reason] for reason in reasons
            }

        await eventually(lambda: _has(counts, "WorkerReady", [3]), "one Event says three times that it is ready")
        assert (await counts())["Suspended"] == [2]


async def _has(counts: Callable[[], Awaitable[dict[str, list[int]]]], reason: str, expected: list[int]) -> bool:
    return (await counts()).get(reason) == expected


async def test_a_claim_that_gets_no_volume_is_created_again_as_the_spec_is_corrected(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    wrong, right = {"storageClassName": "fats", "size": "999Ti"}, {"storageClassName": "fast", "size": "10Gi"}
    kubelet.idle = True
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest(storage=wrong))
        await eventually(lambda: hands.get(PODS, "tiny-0"), "the pod waits for its volume")
        before = await hands.get(CLAIMS, "tiny-journal")
        await hands.patch(SESSIONS, "tiny", {"spec": {"storage": right}})

        async def is_created_again() -> bool:
            claim = await hands.get(CLAIMS, "tiny-journal")
            return claim is not None and claim["metadata"]["uid"] != (before or {})["metadata"]["uid"]

        await eventually(is_created_again, "another claim")
        kubelet.idle = False
        ready = await comes_to_rest(hands, "WorkerReady")
        claim = await hands.get(CLAIMS, "tiny-journal")
    assert claim is not None
    assert claim["spec"]["storageClassName"] == "fast"
    assert ready["status"]["workerId"] == claim["metadata"]["uid"]
