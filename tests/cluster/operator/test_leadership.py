"""Two operators, of which one acts; the other takes over when the first dies, freezes or is stopped."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from support.kubernetes.api_proxy import proxy_to
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet, whole_namespace
from support.operator.operators import (
    OperatorProgram,
    comes_to_rest,
    eventually,
    operator_program,
    session_manifest,
    settings_for,
    writes_of,
)
from testcluster.ports import free_port
from tinsmith_operator.kube.resources import LEASES, SERVICES, SESSIONS, ApiCall
from tinsmith_operator.settings import Settings

# What the chart promises with its lease of 15 s.
LEASE_SECONDS = 15
HAND_OVER_SECONDS = 20.0


async def holder(hands: KubectlUser) -> str:
    lease = await hands.get(LEASES, "tinsmith-operator")
    return str(lease["spec"].get("holderIdentity", "")) if lease else ""


async def taken_at(hands: KubectlUser) -> datetime:
    lease = await hands.get(LEASES, "tinsmith-operator")
    assert lease is not None
    return datetime.fromisoformat(lease["spec"]["acquireTime"])


async def leads(hands: KubectlUser, identity: str) -> None:
    async def look() -> bool:
        return await holder(hands) == identity

    await eventually(look, f"{identity} leads")


def pair(hands: KubectlUser, **changes: Any) -> tuple[Settings, Settings]:
    """Two operators whose writes can be counted."""
    first, second = (
        settings_for(hands.namespace, identity=identity, metrics_port=free_port(), **changes)
        for identity in ("first", "second")
    )
    return first, second


async def is_up(settings: Settings) -> None:
    async def answers() -> bool:
        try:
            return await writes_of(settings) >= 0
        except aiohttp.ClientError:
            return False

    await eventually(answers, f"{settings.identity} is there")


async def test_the_second_operator_leads_within_20_s_of_a_kill_and_acts(hands: KubectlUser, kubelet: Kubelet) -> None:
    """Until then it has written nothing."""
    one, other = pair(hands, lease_seconds=LEASE_SECONDS)
    async with operator_program(one) as first:
        await leads(hands, "first")
        async with operator_program(other):
            await hands.create(SESSIONS, session_manifest())
            await comes_to_rest(hands, "WorkerReady")
            await is_up(other)
            assert await writes_of(one) > 0
            assert await writes_of(other) == 0
            first.signal(signal.SIGKILL)
            died_at = datetime.now(UTC)
            await hands.delete(SERVICES, "tiny")

            async def is_back() -> Any:
                return await hands.get(SERVICES, "tiny")

            await eventually(is_back, "the Service is back")
            assert await holder(hands) == "second"
            assert (await taken_at(hands) - died_at).total_seconds() < HAND_OVER_SECONDS
            assert await writes_of(other) > 0


async def test_the_second_leads_within_20_s_of_a_freeze_and_the_first_writes_nothing_when_it_wakes(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    """It still holds the lease for all it knows, and has work to do at once."""
    one, other = pair(hands, lease_seconds=LEASE_SECONDS)
    async with operator_program(one) as first:
        await leads(hands, "first")
        async with operator_program(other):
            await hands.create(SESSIONS, session_manifest())
            await comes_to_rest(hands, "WorkerReady")
            await is_up(other)
            made = await writes_of(one)
            first.signal(signal.SIGSTOP)
            died_at = datetime.now(UTC)
            await hands.delete(SERVICES, "tiny")

            async def is_back() -> Any:
                return await hands.get(SERVICES, "tiny")

            await eventually(is_back, "the Service is back")
            assert (await taken_at(hands) - died_at).total_seconds() < HAND_OVER_SECONDS
            await hands.patch(SESSIONS, "tiny", {"spec": {"adapters": {"slots": 9}}})
            await comes_to_rest(hands, "WorkerReady")
            settled = await at_rest(hands)
            before = len(first.lines)
            first.signal(signal.SIGCONT)
            await knows_that_it_leads_no_more(first, before)
            assert await written(hands) == settled
            assert await holder(hands) == "second"
            assert await writes_of(one) == made


async def test_a_write_that_was_on_its_way_when_its_operator_froze_does_nothing_when_it_arrives(
    api_cluster: Cluster, hands: KubectlUser, kubelet: Kubelet, tmp_path: Path
) -> None:
    one, other = pair(hands, lease_seconds=LEASE_SECONDS)
    without_suspend = asyncio.Event()
    change = ApiCall("patch", "statefulsets", "tiny")
    async with (
        proxy_to(api_cluster.kubeconfig) as proxy,
        proxy.serve(tmp_path) as slow_way,
        operator_program(one, KUBECONFIG=str(slow_way)) as first,
    ):
        await leads(hands, "first")
        async with operator_program(other):
            await hands.create(SESSIONS, session_manifest())
            await comes_to_rest(hands, "WorkerReady")
            proxy.hold = lambda call: without_suspend if call == change else None
            await hands.patch(SESSIONS, "tiny", {"spec": {"adapters": {"slots": 9}}})

            async def is_on_its_way() -> bool:
                return change in proxy.held

            await eventually(is_on_its_way, "the first one has sent its write")
            first.signal(signal.SIGSTOP)
            await leads(hands, "second")
            await comes_to_rest(hands, "WorkerReady")
            settled = await at_rest(hands)
            without_suspend.set()

            async def has_arrived() -> int | None:
                return proxy.held[change]

            assert await eventually(has_arrived, "the write has arrived") == 409
            before = len(first.lines)
            first.signal(signal.SIGCONT)
            await knows_that_it_leads_no_more(first, before)
            assert await written(hands) == settled


async def knows_that_it_leads_no_more(operator: OperatorProgram, after_line: int) -> None:
    async def knows() -> bool:
        return any('"not leading"' in line for line in operator.lines[after_line:])

    await eventually(knows, "it knows that it leads no more")


async def test_a_leader_that_receives_sigterm_exits_cleanly_and_its_successor_begins_at_once(
    hands: KubectlUser,
) -> None:
    async with operator_program(settings_for(hands.namespace, identity="first", lease_seconds=60)) as first:
        await leads(hands, "first")
        async with operator_program(settings_for(hands.namespace, identity="second", lease_seconds=5)):
            first.signal(signal.SIGTERM)
            assert await first.ended() == 0
            await leads(hands, "second")


async def test_the_successor_of_a_process_that_dies_at_a_write_finishes_the_work(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    """The same as in the cut points, with a real death."""
    await hands.create(SESSIONS, session_manifest())
    async with operator_program(settings_for(hands.namespace, identity="one-pod", failpoint=7)) as first:
        assert await first.ended() == -signal.SIGKILL
    async with operator_program(settings_for(hands.namespace, identity="one-pod")):
        await comes_to_rest(hands, "WorkerReady")


async def at_rest(hands: KubectlUser) -> dict[str, str]:
    """Wait for rest. The controller of a StatefulSet may report a ready pod after the operator has."""
    seen, unchanged = await written(hands), 0
    while unchanged < 8:
        await asyncio.sleep(0.3)
        now = await written(hands)
        seen, unchanged = now, unchanged + 1 if now == seen else 0
    return seen


async def written(hands: KubectlUser) -> dict[str, str]:
    """Every object with its version."""
    objects = await whole_namespace(hands)
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in objects}
