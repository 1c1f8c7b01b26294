"""The Job that converts a session's model, with the real controller of Jobs; the tests' kubelet ends its pods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet, is_of_a_job
from support.operator.built_sessions import NEMO_RL
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    operator_program,
    session_manifest,
    settings_for,
)
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION
from tinsmith_operator.kube.resources import JOBS, PODS, SESSIONS, WORKLOADS

NAME = "tiny-conversion"
CONVERTED: dict[str, Any] = {**NEMO_RL, "modelCache": {"claimName": "models"}}
DELETES = {"retentionPolicy": {"whenDeleted": "Delete"}}


@pytest.fixture
def idle(kubelet: Kubelet) -> Kubelet:
    """Start a cluster that leaves pods as they are until the test acts."""
    kubelet.idle = True
    return kubelet


async def converters(hands: KubectlUser) -> list[dict[str, Any]]:
    return [pod for pod in await hands.all(PODS) if is_of_a_job(pod)]


async def the_converter(hands: KubectlUser) -> dict[str, Any]:
    [pod] = await eventually(lambda: converters(hands), "the Job has a pod")
    return dict(pod)


def says(hands: KubectlUser, reason: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return bool(condition_of(await hands.get(SESSIONS, "tiny"), "Ready").get("reason") == reason)

    return look


async def test_a_session_is_converted_for_once_with_the_rights_of_the_chart(
    api_cluster: Cluster, hands: KubectlUser, idle: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(api_cluster, rights_of(hands.namespace))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))
    async with operator_program(settings_for(hands.namespace, delete_grace_seconds=1)) as program:
        await hands.create(SESSIONS, session_manifest(**CONVERTED, storage=DELETES))
        await the_converter(hands)
        await eventually(says(hands, "WaitingForScheduler"), "the trouble of its pod is the session's")
        assert await hands.all(WORKLOADS) == []

        await idle.end(await the_converter(hands), exit_code=2, message="--nodes must be positive")
        await comes_to_rest(hands, "ConversionFailed")
        assert await hands.all(WORKLOADS) == []

        idle.idle = False
        annotations = {RESTART_REQUEST_ANNOTATION: "2026-01-31T12:00:00Z"}
        await hands.patch(SESSIONS, "tiny", {"metadata": {"annotations": annotations}})
        await comes_to_rest(hands, "WorkerReady")
        before = await hands.get(JOBS, NAME)

        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        await comes_to_rest(hands, "Suspended")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": False}})
        await comes_to_rest(hands, "WorkerReady")
        after = await hands.get(JOBS, NAME)
        assert before is not None
        assert after is not None
        assert after["metadata"]["uid"] == before["metadata"]["uid"]

        await hands.delete(SESSIONS, "tiny")

        async def gone() -> bool:
            return not [*await hands.all(SESSIONS), *await hands.all(JOBS), *await hands.all(PODS)]

        await eventually(gone, "the session is gone with its Job")
    assert "forbidden" not in program.log.lower()


async def create(hands: KubectlUser) -> None:
    await hands.create(SESSIONS, session_manifest(**CONVERTED))
