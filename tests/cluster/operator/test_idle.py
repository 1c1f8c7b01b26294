"""Idle sessions and pools in a real API: suspended, woken by the API server's right alone, and deleted at the end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    Writes,
    comes_to_rest,
    content_worker,
    eventually,
    pool_manifest,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.kube.resources import DEPLOYMENTS, POOLS, SESSIONS, WORKLOADS, Resource
from tinsmith_operator.runtime.worker_client import Target

IDLE = {"suspendAfterSeconds": 10}


class Workers:
    """All workers, which a client uses or which have been idle for an hour."""

    def __init__(self) -> None:
        self.idle_seconds = 3600.0

    async def describe(self, target: Target) -> WorkerReport:
        return replace(await content_worker(target), idle_seconds=self.idle_seconds)


@pytest.fixture
def account(api_cluster: Cluster, hands: KubectlUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that the test starts have the rights of the chart's service account."""
    grant(api_cluster, rights_of(hands.namespace))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))


async def want(hands: KubectlUser, resource: Resource) -> None:
    """Write a wake request as an API server does."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    await hands.patch(resource, "tiny", {"status": {"wantedTime": now}}, subresource="status")


async def replicas_of(hands: KubectlUser, resource: Resource, name: str) -> Any:
    workload = await hands.get(resource, name)
    return workload["spec"]["replicas"] if workload is not None else None


@pytest.mark.parametrize("cut_before", [1, 2, 3])
async def test_an_idle_session_sleeps_and_wakes_although_an_operator_dies_before_each_write(
    hands: KubectlUser, kubelet: Kubelet, account: None, cut_before: int
) -> None:
    workers, settings = Workers(), settings_for(hands.namespace, identity="one")
    workers.idle_seconds = 0.0
    async with running(settings, describe=workers.describe):
        await hands.create(SESSIONS, session_manifest(idle=IDLE))
        await comes_to_rest(hands, "WorkerReady")
    for reason, idle_seconds, replicas in (("Idle", 3600.0, 0), ("WorkerReady", 0.0, 1), ("Idle", 3600.0, 0)):
        workers.idle_seconds = idle_seconds
        if idle_seconds == 0.0:
            await want(hands, SESSIONS)
        writes = Writes(cut_before)
        async with running(settings, writes, describe=workers.describe):
            await writes.was_cut.wait()
        async with running(settings, describe=workers.describe):
            session = await comes_to_rest(hands, reason)
            assert await replicas_of(hands, WORKLOADS, "tiny") == replicas
    assert session["spec"]["idle"] == IDLE
    assert session["spec"].get("suspend", False) is False


async def test_an_idle_pool_has_no_replicas_until_it_is_wanted(
    hands: KubectlUser, kubelet: Kubelet, account: None
) -> None:
    workers = Workers()
    async with running(settings_for(hands.namespace), describe=workers.describe):
        await hands.create(POOLS, pool_manifest(idle=IDLE, replicas=2))
        await comes_to_rest(hands, "Idle", resource=POOLS)
        assert await replicas_of(hands, DEPLOYMENTS, "tiny-sampler") == 0
        workers.idle_seconds = 0.0
        await want(hands, POOLS)
        ready = await comes_to_rest(hands, "ReplicasReady", resource=POOLS)
        assert ready["spec"]["replicas"] == await replicas_of(hands, DEPLOYMENTS, "tiny-sampler") == 2


@pytest.mark.parametrize(("resource", "manifest"), [(SESSIONS, session_manifest), (POOLS, pool_manifest)])
async def test_what_is_idle_for_too_long_is_deleted(
    hands: KubectlUser, kubelet: Kubelet, account: None, resource: Resource, manifest: Any
) -> None:
    async with running(settings_for(hands.namespace), describe=Workers().describe):
        await hands.create(resource, manifest(idle={"deleteAfterSeconds": 10}))

        async def gone() -> bool:
            return await hands.get(resource, "tiny") is None

        await eventually(gone, "it is gone")
