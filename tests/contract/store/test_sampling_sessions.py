import asyncio

import pytest
from support.server.store_records import NOW, a_sampling_session, a_session, later
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
async def _sessions(store: Store) -> None:
    for session_id in ("session-1", "session-2"):
        await store.create_session(a_session(session_id), None)


async def test_a_sampling_session_comes_back_as_it_went_in(store: Store) -> None:
    ephemeral = a_sampling_session(
        seq_id=2**53 + 1,
        model_id="session-1:train:0",
        inflight=True,
        checkpoint_directory="ephemeral/1",
        manifest_digest="0123",
    )
    named = a_sampling_session(seq_id=1, model_path="tinker://session-1:train:0/sampler_weights/first")
    for session in (ephemeral, named):
        await store.add_sampling_session(session)

        assert await store.get_sampling_session(session.sampling_session_id) == session

    assert await store.get_sampling_session("session-1:sample:7") is None


async def test_twenty_concurrent_opens_of_one_number_give_one(store: Store, replicas: tuple[Store, Store]) -> None:
    opens = [
        replicas[number % 2].add_sampling_session(a_sampling_session(model_path=f"tinker://{number}"))
        for number in range(20)
    ]

    opened = await asyncio.gather(*opens)

    assert all(session == opened[0] for session in opened)
    assert await store.sampler_ids_of_session("session-1") == [opened[0].sampling_session_id]


async def test_clients_that_join_at_once_have_numbers_of_their_own(store: Store, replicas: tuple[Store, Store]) -> None:
    for number in range(2):
        await store.add_sampling_session(a_sampling_session(seq_id=number))

    joined = await asyncio.gather(
        *(replicas[number % 2].add_sampling_client("session-1:sample:0") for number in range(8))
    )

    assert sorted(joined) == list(range(1, 9))
    assert await replicas[1].add_sampling_client("session-1:sample:1") == 1


async def test_sampling_sessions_of_a_session_come_in_their_own_order(store: Store) -> None:
    for number in (10, 9, 2):
        await store.add_sampling_session(a_sampling_session(seq_id=number))
    await store.add_sampling_session(a_sampling_session("session-2"))

    found = await store.sampler_ids_of_session("session-1")

    assert found == [f"session-1:sample:{number}" for number in (2, 9, 10)]


async def test_the_newest_inflight_save_is_the_clients_last_regardless_of_clocks(store: Store) -> None:
    model_id = "session-1:train:0"
    for number, created_at in [(9, later(10)), (10, NOW)]:
        inflight = a_sampling_session(seq_id=number, model_id=model_id, inflight=True, created_at=created_at)
        await store.add_sampling_session(inflight)
    await store.add_sampling_session(a_sampling_session(seq_id=11, model_id=model_id))
    await store.add_sampling_session(a_sampling_session(seq_id=12, model_id="session-1:train:1", inflight=True))

    newest = await store.newest_inflight(model_id)

    assert newest is not None
    assert newest.sampling_session_seq_id == 10
    assert await store.newest_inflight("session-1:train:2") is None
