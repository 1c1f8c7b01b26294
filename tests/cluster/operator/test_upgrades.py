"""Another operator and another default image: workers run on until a user restarts them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import comes_to_rest, condition_of, eventually, running, session_manifest, settings_for
from tinsmith_operator.api.names import SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.build import pod as pod_builder
from tinsmith_operator.kube.resources import PODS, SESSIONS, WORKLOADS
from tinsmith_operator.runtime.worker_client import Target
from tinsmith_operator.settings import Settings

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"
ASKED_AT = "2026-02-01T12:00:00Z"
WORK = {"spec": {"storage": {"size": "11Gi"}}}
"""An operator that restarts no worker, and comes to rest after it has seen the present session."""


@pytest.fixture
def old(hands: KubectlUser) -> Settings:
    return settings_for(hands.namespace)


@pytest.fixture
def new(hands: KubectlUser) -> Settings:
    return settings_for(hands.namespace, trainer_image=NEW_IMAGE)


async def pod(hands: KubectlUser) -> dict[str, Any]:
    found = await hands.get(PODS, "tiny-0")
    assert found is not None
    return found


async def upgrade_condition(hands: KubectlUser, status: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        found = condition_of(await hands.get(SESSIONS, "tiny"), "UpgradeAvailable")
        return found if found.get("status") == status else None

    found: dict[str, Any] = await eventually(look, f"UpgradeAvailable is {status}")
    return found


async def test_neither_an_upgrade_nor_a_downgrade_of_operator_and_image_restarts_a_worker(
    hands: KubectlUser, kubelet: Kubelet, old: Settings, new: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(old):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
    before = await pod(hands)

    with monkeypatch.context() as newer:
        newer.setattr(pod_builder, "POD_SECURITY", {**pod_builder.POD_SECURITY, "supplementalGroups": [4711]})
        async with running(new):
            condition = await upgrade_condition(hands, "True")
            await comes_to_rest(hands, "WorkerReady")
            workload = await hands.get(WORKLOADS, "tiny")
    assert condition["reason"] == "NewDefaultImage"
    assert workload is not None
    template = workload["spec"]["template"]["spec"]
    assert template["securityContext"]["supplementalGroups"] == [4711], "the newer template waits for the next start"
    assert template["containers"][0]["image"].startswith("tinsmith.local/tinsmith/trainer@sha256:")

    async with running(old):
        await upgrade_condition(hands, "False")
        await comes_to_rest(hands, "WorkerReady")
    after = await pod(hands)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]


async def test_a_requested_snapshot_is_taken_once_by_the_leader(
    hands: KubectlUser, kubelet: Kubelet, old: Settings
) -> None:
    asked: list[Target] = []

    async def snapshot(target: Target) -> datetime:
        asked.append(target)
        return datetime.now(UTC)

    async def is_answered() -> Any:
        session = await hands.get(SESSIONS, "tiny")
        assert session is not None
        return session["status"].get("requests") == {"snapshot": ASKED_AT} and session

    async with running(old, snapshot=snapshot):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        assert asked == []
        await hands.patch(SESSIONS, "tiny", {"metadata": {"annotations": {SNAPSHOT_REQUEST_ANNOTATION: ASKED_AT}}})
        session = await eventually(is_answered, "the request is answered")
    assert session["status"]["lastSnapshotTime"] > ASKED_AT
    assert [target.pod_uid for target in asked] == [(await pod(hands))["metadata"]["uid"]]

    async with running(old, snapshot=snapshot):
        await hands.patch(SESSIONS, "tiny", WORK)
        await comes_to_rest(hands, "WorkerReady")
    assert len(asked) == 1


async def waits(hands: KubectlUser, name: str) -> bool:
    found = await hands.get(PODS, f"{name}-0")
    return found is not None and found["spec"]["containers"][0]["image"] == NEW_IMAGE
