"""Suspend, resume, restart and snapshot, asked by `kubectl tinsmith` and done by a real operator."""

from __future__ import annotations

from datetime import UTC, datetime

from cluster.plugin.conftest import Plugin, aside
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import comes_to_rest, running, session_manifest, settings_for
from tinsmith_operator.kube.resources import PODS, SESSIONS
from tinsmith_operator.runtime.worker_client import Target


async def test_a_session_is_suspended_and_resumed_and_each_time_waited_for(
    hands: KubectlUser, kubelet: Kubelet, plugin: Plugin
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        suspended = await aside(plugin, "suspend", "tiny", "--timeout=120")
        assert (suspended.status, await hands.all(PODS)) == (0, [])
        assert "TrainingSession tiny is suspended" in suspended.out
        resumed = await aside(plugin, "resume", "tiny", "--timeout=120")
        assert resumed.status == 0
        assert "TrainingSession tiny is ready" in resumed.out


async def test_a_session_that_cannot_start_is_not_waited_for(
    hands: KubectlUser, kubelet: Kubelet, plugin: Plugin
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest(suspend=True, storage={"existingClaim": "not-there"}))
        await comes_to_rest(hands, "ClaimMissing")
        said = await aside(plugin, "resume", "tiny", "--timeout=120")
        assert said.status == 1
        assert "ClaimMissing" in said.err.splitlines()[-1]


async def test_a_restart_replaces_the_pod(hands: KubectlUser, kubelet: Kubelet, plugin: Plugin) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        [before] = await hands.all(PODS)
        said = await aside(plugin, "restart", "tiny", "--timeout=120")
        assert said.status == 0, said.err
        [after] = await hands.all(PODS)
        assert before["metadata"]["uid"] != after["metadata"]["uid"]


async def test_a_snapshot_is_waited_for_until_the_worker_has_taken_it(
    hands: KubectlUser, kubelet: Kubelet, plugin: Plugin
) -> None:
    async def take(target: Target) -> datetime:
        return datetime.now(UTC)

    async with running(settings_for(hands.namespace), snapshot=take):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        said = await aside(plugin, "snapshot", "tiny", "--timeout=120")
        assert said.status == 0, said.err
        assert "TrainingSession tiny has a snapshot" in said.out
