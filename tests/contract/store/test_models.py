import asyncio
from typing import get_args

import pytest
from support.server.store_records import NOW, a_model, a_session, later
from tinsmith_server.store.records import FinalState, ModelState
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
async def _sessions(store: Store) -> None:
    for session_id in ("session-1", "session-2"):
        await store.create_session(a_session(session_id), None)


async def test_a_model_comes_back_as_it_went_in(store: Store) -> None:
    model = a_model(user_metadata={"purpose": "test"}, model_seq_id=2**53 + 1, create_kind="load")

    assert await store.add_model(model) == model
    assert await store.get_model(model.model_id) == model
    assert await store.get_model("session-1:train:7") is None


async def test_a_repeated_create_gives_the_first_model(store: Store) -> None:
    first = await store.add_model(a_model(create_payload=b"first", worker_id="worker-1"))

    assert await store.add_model(a_model(create_payload=b"second", worker_id="worker-2")) == first


async def test_twenty_concurrent_creates_make_one_model(store: Store, replicas: tuple[Store, Store]) -> None:
    attempts = [replicas[number % 2].add_model(a_model(create_payload=bytes([number]))) for number in range(20)]

    made = await asyncio.gather(*attempts)

    assert all(model == made[0] for model in made)
    assert await store.live_models_of_session("session-1") == [made[0]]


@pytest.mark.parametrize("final", get_args(FinalState))
async def test_the_first_end_of_a_model_is_final(store: Store, final: FinalState) -> None:
    model = await store.add_model(a_model())
    await store.end_model(model.model_id, final, "first reason")

    for attempt in get_args(FinalState):
        await store.end_model(model.model_id, attempt, "second reason")

        assert await store.get_model(model.model_id) == a_model(state=final, failure="first reason")
    assert not await store.bind_model(model.model_id, "worker-1")


async def test_models_are_listed_newest_first_in_pages(store: Store) -> None:
    for number in range(4):
        await store.add_model(a_model(model_seq_id=number, created_at=later(number)))
    await store.add_model(a_model("session-2", tenant="grace"))

    page = await store.list_models("ada", limit=2, offset=1)

    assert ([model.model_seq_id for model in page.rows], page.total) == ([2, 1], 4)


async def test_the_models_of_one_project_are_those_of_its_sessions_in_pages_and_in_their_number(store: Store) -> None:
    for session, project in (("in-1", "wanted"), ("in-2", "wanted"), ("out", "other"), ("none", None)):
        await store.create_session(a_session(session, project_id=project), None)
        for number in range(2):
            await store.add_model(a_model(session, number, created_at=later(number)))
    await store.create_session(a_session("of-grace", tenant="grace", project_id="wanted"), None)
    await store.add_model(a_model("of-grace", tenant="grace"))

    page = await store.list_models("ada", limit=2, offset=1, project_id="wanted")

    assert ([model.model_id for model in page.rows], page.total) == (["in-1:train:1", "in-2:train:0"], 4)
    assert (await store.list_models("ada", limit=2, offset=0, project_id="unknown")).total == 0
    assert (await store.list_models("ada", limit=2, offset=0)).total == 8


async def test_a_model_is_not_listed_when_its_creation_failed(store: Store) -> None:
    model = await store.add_model(a_model())
    await store.end_model(model.model_id, "failed", "no such base model")

    assert (await store.list_models("ada", limit=20, offset=0)).total == 0


async def test_a_model_that_a_command_made_for_a_moment_is_not_listed_and_can_be_asked_for(store: Store) -> None:
    said = {"a": "tinsmith-purpose", 'quoted "tinsmith-purpose": ': "x", "nul": "\0"}
    for number, metadata in enumerate((None, {}, said, {"tinsmith-purpose": "evaluation"})):
        await store.add_model(a_model(model_seq_id=number, user_metadata=metadata, created_at=later(number)))

    page = await store.list_models("ada", limit=10, offset=0)

    assert ([model.model_seq_id for model in page.rows], page.total) == ([2, 1, 0], 3)
    assert await store.get_model("session-1:train:3") is not None


async def test_of_a_session_those_that_ended_live_no_more_and_those_that_were_never_made_are_not_listed(
    store: Store,
) -> None:
    states: list[ModelState] = ["accepted", "bound", "released", "corrupted", "failed"]
    for number, state in enumerate(states):
        await store.add_model(a_model(model_seq_id=number, state=state))

    assert [model.state for model in await store.live_models_of_session("session-1")] == ["accepted", "bound"]
    assert await store.model_ids_of_session("session-1") == [f"session-1:train:{number}" for number in range(4)]


async def test_accepted_models_come_oldest_first_wherever_they_are_placed(store: Store) -> None:
    await store.add_model(a_model(model_seq_id=0, created_at=later(2), worker_id=""))
    await store.add_model(a_model(model_seq_id=1, created_at=later(1)))
    await store.add_model(a_model(model_seq_id=2, state="bound"))

    assert [model.model_seq_id for model in await store.accepted_models()] == [1, 0]


async def test_times_keep_their_microseconds_and_their_moment(store: Store) -> None:
    model = await store.add_model(a_model())

    assert model.created_at == NOW
    assert model.created_at.isoformat() == "2026-03-01T12:00:00.123456+00:00"
