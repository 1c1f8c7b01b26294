"""Another operator, another default image: workers run on, until somebody wants them to restart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import comes_to_rest, condition_of, eventually, running, session_manifest, settings_for
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION, SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.build import pod as pod_builder
from tinsmith_operator.kube.resources import PODS, SESSIONS, WORKLOADS
from tinsmith_operator.runtime.worker_client import Target
from tinsmith_operator.settings import Settings

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"
ASKED_AT = "2026-02-01T12:00:00Z"
WORK = {"spec": {"storage": {"size": "11Gi"}}}
"""Restarts nobody. An operator that comes to rest after it has looked at the session as it is now."""


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


async def test_a_newer_operator_with_a_newer_image_restarts_nobody_and_neither_does_the_way_back(
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


async def test_a_restart_that_is_asked_for_brings_the_new_image_once(
    hands: KubectlUser, kubelet: Kubelet, old: Settings, new: Settings
) -> None:
    async with running(old):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
    before = (await pod(hands))["metadata"]["uid"]
    async with running(new):
        await upgrade_condition(hands, "True")
        await hands.patch(SESSIONS, "tiny", {"metadata": {"annotations": {RESTART_REQUEST_ANNOTATION: ASKED_AT}}})
        await upgrade_condition(hands, "False")
        session = await comes_to_rest(hands, "WorkerReady")
    restarted = await pod(hands)
    assert restarted["metadata"]["uid"] != before
    assert restarted["spec"]["containers"][0]["image"] == NEW_IMAGE
    assert session["status"]["requests"] == {"restart": ASKED_AT}

    async with running(new):
        annotations = {RESTART_REQUEST_ANNOTATION: None}
        await hands.patch(SESSIONS, "tiny", {"metadata": {"annotations": annotations}, **WORK})
        await comes_to_rest(hands, "WorkerReady")
    assert (await pod(hands))["metadata"]["uid"] == restarted["metadata"]["uid"]


async def test_a_snapshot_that_is_asked_for_is_taken_once_by_whichever_operator_leads(
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


NAMES = ("one", "two", "three")


async def test_sessions_take_a_new_default_in_turn_and_the_next_waits_until_the_one_before_serves_again(
    hands: KubectlUser, kubelet: Kubelet, old: Settings
) -> None:
    async with running(old):
        for name in NAMES:
            await hands.create(SESSIONS, session_manifest(name))
        for name in NAMES:
            await comes_to_rest(hands, "WorkerReady", name)
    most = 0

    async def are_new() -> bool:
        nonlocal most
        sessions = await hands.all(SESSIONS)
        said = [condition_of(session, "UpgradeAvailable")["reason"] for session in sessions]
        most = max(most, said.count("TakingItsTurn"))
        return all(session["status"]["image"] == NEW_IMAGE for session in sessions) and set(said) == {"ImageCurrent"}

    new = settings_for(hands.namespace, trainer_image=NEW_IMAGE, restart_automatically=True)
    async with running(new):
        await eventually(are_new, "all of them run the new image")
    assert most == 1


async def test_a_session_that_does_not_come_back_stops_the_turns_until_somebody_suspends_it(
    hands: KubectlUser, kubelet: Kubelet, old: Settings
) -> None:
    async with running(old):
        for name in NAMES:
            await hands.create(SESSIONS, session_manifest(name))
        for name in NAMES:
            await comes_to_rest(hands, "WorkerReady", name)
    kubelet.idle = True

    async def taking() -> list[str]:
        sessions = await hands.all(SESSIONS)
        reasons = {each["metadata"]["name"]: condition_of(each, "UpgradeAvailable")["reason"] for each in sessions}
        return [name for name, reason in reasons.items() if reason == "TakingItsTurn"]

    new = settings_for(hands.namespace, trainer_image=NEW_IMAGE, restart_automatically=True)
    async with running(new):
        [stuck] = await eventually(taking, "one has its turn")
        await eventually(lambda: waits(hands, stuck), "its new pod waits")
    # Who leads next knows whose turn it is.
    async with running(new):
        for name in NAMES:
            await hands.patch(SESSIONS, name, WORK)
        for name in set(NAMES) - {stuck}:
            await comes_to_rest(hands, "WorkerReady", name)
        assert await taking() == [stuck]
        await hands.patch(SESSIONS, stuck, {"spec": {"suspend": True}})
        [other] = await eventually(lambda: others(taking, stuck), "the next one has its turn")
    assert other in NAMES


async def waits(hands: KubectlUser, name: str) -> bool:
    found = await hands.get(PODS, f"{name}-0")
    return found is not None and found["spec"]["containers"][0]["image"] == NEW_IMAGE


async def others(taking: Callable[[], Awaitable[list[str]]], stuck: str) -> list[str]:
    return [name for name in await taking() if name != stuck]
