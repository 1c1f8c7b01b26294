"""Sessions that the server makes by itself, in a real Kubernetes API: as many as may be, and never one more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from support.server.operator_stand_in import MODEL, StandInOperator
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store

BIG_MODEL = "org/big"


@pytest.fixture
async def templates(operator: StandInOperator) -> None:
    await operator.apply_template("tiny", maxSessions=2, adapters={"slots": 1, "maxRank": 16})
    await operator.apply_template("big", model=BIG_MODEL, sampling="None")


@pytest.fixture
async def fleet(templates: None, cluster_settings: Settings, store: Store) -> AsyncIterator[KubernetesFleet]:
    fleet = KubernetesFleet(cluster_settings)
    await fleet.open(store)
    yield fleet
    await fleet.close()


async def test_a_session_is_created_for_waiting_clients_and_another_after_the_first_is_at_work(
    fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    for _ in range(3):
        assert f"TrainingSession {operator.title('tiny-1')} is" in await fleet.provide(MODEL, rank=8)
    assert await operator.session_names() == ["tiny-1"]
    made = await operator.session("tiny-1")
    assert made["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "tinsmith-api-server",
        "tinsmith.dev/template": "tiny",
    }
    assert made["spec"] == {"templateRef": {"name": "tiny"}, "suspend": False}
    await operator.run("tiny-1")
    while not fleet.trainers(MODEL, 8):
        await fleet.changes.beyond(fleet.changes.count)
    assert f"TrainingSession {operator.title('tiny-2')} is" in await fleet.provide(MODEL, rank=8)
    await operator.run("tiny-2")
    while len(fleet.trainers(MODEL, 8)) < 2:
        await fleet.changes.beyond(fleet.changes.count)
    assert "tiny has all 2 of its sessions" in await fleet.provide(MODEL, rank=8)
    assert await operator.session_names() == ["tiny-1", "tiny-2"]


async def test_servers_that_want_a_session_at_the_same_time_make_one(
    templates: None, cluster_settings: Settings, operator: StandInOperator, store: Store
) -> None:
    fleets = [KubernetesFleet(cluster_settings) for _ in range(4)]
    await asyncio.gather(*(fleet.open(store) for fleet in fleets))
    answers = await asyncio.gather(*(fleet.provide(MODEL) for fleet in fleets for _ in range(3)))
    assert all(f"TrainingSession {operator.title('tiny-1')} is" in answer for answer in answers)
    assert await operator.session_names() == ["tiny-1"]
    await asyncio.gather(*(fleet.close() for fleet in fleets))


async def test_a_session_name_in_use_is_skipped_and_not_counted(
    fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply("tiny-1", model="org/unrelated")
    while fleet.model("org/unrelated") is None:
        await fleet.changes.beyond(fleet.changes.count)
    assert f"TrainingSession {operator.title('tiny-2')} is being created" in await fleet.provide(MODEL)
    assert await operator.session_names() == ["tiny-1", "tiny-2"]


async def test_waiting_clients_get_the_refusal_of_a_session(fleet: KubernetesFleet, operator: StandInOperator) -> None:
    quota = {"count/trainingsessions.tinsmith.dev": "0"}
    manifest = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": quota}}
    await operator.kubectl("apply", "--filename=-", stdin=json.dumps(manifest))
    sentence = await fleet.provide(MODEL)
    assert sentence.startswith("no session can be created from the template tiny: ")
    assert "quota: none" in sentence
    assert await fleet.provide(MODEL) == sentence
    assert await operator.session_names() == []


async def test_a_template_that_is_added_or_changed_counts_at_once(
    fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    async def until_rank(model: str, rank: int | None) -> None:
        while (served := fleet.model(model)) is None or served.max_rank != rank:
            await fleet.changes.beyond(fleet.changes.count)

    await operator.apply_template("late", model="org/late", adapters={"maxRank": 16})
    await until_rank("org/late", 16)
    await operator.apply_template("late", model="org/late", adapters={"maxRank": 32})
    await until_rank("org/late", 32)
