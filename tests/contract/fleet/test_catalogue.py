"""Sessions that the server makes by itself, in a real Kubernetes API: as many as may be, and never one more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.server.operator_stand_in import MODEL, StandInOperator, spec_of
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store

BIG_MODEL = "org/big"
CATALOGUE = [
    {"name": "tiny", "maxSessions": 2, "spec": spec_of(adapters={"slots": 1, "maxRank": 16})},
    {"name": "big", "maxSessions": 1, "spec": spec_of(BIG_MODEL, sampling="None")},
]


@pytest.fixture
def catalogued(cluster_settings: Settings, tmp_path: Path) -> Settings:
    return with_catalogue(cluster_settings, tmp_path, CATALOGUE)


@pytest.fixture
async def fleet(catalogued: Settings, store: Store) -> AsyncIterator[KubernetesFleet]:
    fleet = KubernetesFleet(catalogued)
    await fleet.open(store)
    yield fleet
    await fleet.close()


def with_catalogue(settings: Settings, folder: Path, entries: list[dict[str, Any]]) -> Settings:
    file = folder / "catalogue.json"
    file.write_text(json.dumps(entries))
    return settings.model_copy(update={"catalogue": file})


async def test_a_session_is_created_for_waiting_clients_and_another_after_the_first_is_at_work(
    fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    for _ in range(3):
        assert f"TrainingSession {operator.title('tiny-1')} is" in await fleet.provide(MODEL, rank=8)
    assert await operator.session_names() == ["tiny-1"]
    made = await operator.session("tiny-1")
    assert made["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "tinsmith-api-server",
        "tinsmith.dev/catalogue-entry": "tiny",
    }
    assert made["spec"]["adapters"] == {"slots": 1, "maxRank": 16}
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
    catalogued: Settings, operator: StandInOperator, store: Store
) -> None:
    fleets = [KubernetesFleet(catalogued) for _ in range(4)]
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


async def test_waiting_clients_get_the_refusal_of_a_spec(
    cluster_settings: Settings, operator: StandInOperator, store: Store, tmp_path: Path
) -> None:
    entries = [{"name": "odd", "maxSessions": 1, "spec": spec_of(adapters={"slots": 0})}]
    fleet = KubernetesFleet(with_catalogue(cluster_settings, tmp_path, entries))
    await fleet.open(store)
    sentence = await fleet.provide(MODEL)
    assert sentence.startswith("no session can be created from the catalogue entry odd: ")
    assert "spec.adapters.slots" in sentence
    assert await fleet.provide(MODEL) == sentence
    assert await operator.session_names() == []
    await fleet.close()


async def test_a_field_that_no_session_has_is_refused_and_not_dropped(
    cluster_settings: Settings, operator: StandInOperator, store: Store, tmp_path: Path
) -> None:
    entries = [{"name": "odd", "maxSessions": 1, "spec": spec_of(slotz=3)}]
    fleet = KubernetesFleet(with_catalogue(cluster_settings, tmp_path, entries))
    await fleet.open(store)
    assert "slotz" in await fleet.provide(MODEL)
    assert await operator.session_names() == []
    await fleet.close()
