"""The operator under the account that the chart gives it: its Role is enough, and it asks for nothing beyond."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    eventually,
    operator_program,
    pool_manifest,
    session_manifest,
    settings_for,
)
from tinsmith_operator.kube.resources import BUDGETS, DEPLOYMENTS, POOLS, SECRETS, SERVICES, SESSIONS

KEY_SECRET = "tinsmith-api-key"


@pytest.fixture
def account(api_cluster: Cluster, hands: KubectlUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that the test starts have the rights of the chart's service account."""
    grant(api_cluster, rights_of(hands.namespace))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))


async def test_the_charts_role_is_enough_for_a_whole_life(hands: KubectlUser, kubelet: Kubelet, account: None) -> None:
    storage = {"retentionPolicy": {"whenDeleted": "Delete"}}
    # No worker answers here, so the deletion waits for none.
    settings = settings_for(hands.namespace, delete_grace_seconds=1)
    async with operator_program(settings) as program:
        await hands.create(SESSIONS, session_manifest(storage=storage))
        await comes_to_rest(hands, "WorkerReady")
        await hands.delete(SERVICES, "tiny")
        await hands.patch(SESSIONS, "tiny", {"spec": {"adapters": {"slots": 9}}})
        await comes_to_rest(hands, "WorkerReady")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        await comes_to_rest(hands, "Suspended")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": False}})
        await comes_to_rest(hands, "WorkerReady")
        await hands.delete(SESSIONS, "tiny")

        async def gone() -> bool:
            return await hands.get(SESSIONS, "tiny") is None

        await eventually(gone, "the session is gone")
    assert "forbidden" not in program.log.lower()


async def test_the_charts_role_is_enough_for_the_life_of_a_pool(
    hands: KubectlUser, kubelet: Kubelet, account: None
) -> None:
    async with operator_program(settings_for(hands.namespace)) as program:
        await hands.create(POOLS, pool_manifest())
        await comes_to_rest(hands, "ReplicasReady", resource=POOLS)
        for resource in (DEPLOYMENTS, SERVICES, BUDGETS):
            await hands.delete(resource, "tiny-sampler")
        await hands.patch(POOLS, "tiny", {"spec": {"adapters": {"maxLoaded": 9}, "replicas": 2}})
        await comes_to_rest(hands, "ReplicasReady", resource=POOLS)
    assert "forbidden" not in program.log.lower()


async def test_the_charts_role_is_enough_for_the_first_key_which_every_later_operator_keeps(
    hands: KubectlUser, account: None
) -> None:
    async def key() -> str | None:
        secret = await hands.get(SECRETS, KEY_SECRET)
        return secret["data"]["key"] if secret else None

    settings = settings_for(hands.namespace, first_key_secret=KEY_SECRET)
    async with operator_program(settings) as first:
        made = await eventually(key, "the key is made")
    async with operator_program(settings) as second:
        await hands.create(SESSIONS, session_manifest())

        async def acts() -> bool:
            return await hands.get(SERVICES, "tiny") is not None

        await eventually(acts, "the second operator acts")
        assert await key() == made

        await hands.delete(SECRETS, KEY_SECRET)
        assert await eventually(key, "a key that was deleted is made anew") != made
    assert "forbidden" not in (first.log + second.log).lower()
