import asyncio

import pytest
from support.server.store_records import a_model, a_session
from tinsmith_server.store.records import Worker
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


async def test_first_sight_by_many_at_once_is_one_row(replicas: tuple[Store, Store]) -> None:
    seen = await asyncio.gather(*(replicas[number % 2].get_worker("worker-1") for number in range(8)))

    assert set(seen) == {Worker("worker-1", 0, "", 0)}


async def test_an_epoch_rises_from_the_expected_one_only(store: Store) -> None:
    assert await store.raise_epoch("worker-1", 0, "instance-a") == Worker("worker-1", 1, "instance-a", 0)
    assert await store.raise_epoch("worker-1", 0, "instance-b") is None
    assert await store.raise_epoch("worker-1", 2, "instance-b") is None
    assert await store.get_worker("worker-1") == Worker("worker-1", 1, "instance-a", 0)
    assert await store.raise_epoch("worker-1", 1, "instance-b") == Worker("worker-1", 2, "instance-b", 0)


async def test_an_epoch_is_read_as_the_last_replica_raised_it(replicas: tuple[Store, Store]) -> None:
    reader, other = replicas
    assert await reader.epoch_of("worker-1") == 0
    for epoch in (0, 1, 2):
        await other.raise_epoch("worker-1", epoch, f"instance-{epoch}")
        assert await reader.epoch_of("worker-1") == epoch + 1
    assert await reader.epoch_of("worker-2") == 0


async def test_exactly_one_of_concurrent_raises_wins(replicas: tuple[Store, Store]) -> None:
    attempts = [replicas[number % 2].raise_epoch("worker-1", 0, f"instance-{number}") for number in range(20)]

    won = [worker for worker in await asyncio.gather(*attempts) if worker is not None]

    assert len(won) == 1
    assert await replicas[0].get_worker("worker-1") == won[0]


async def test_workers_are_known_by_the_models_that_live_there(store: Store) -> None:
    await store.create_session(a_session(), None)
    for number, (worker_id, state) in enumerate([("w1", "bound"), ("w1", "accepted"), ("w2", "released")]):
        await store.get_worker(worker_id)
        await store.add_model(a_model(model_seq_id=number, worker_id=worker_id, state=state))

    assert [worker.worker_id for worker in await store.workers_with_live_models()] == ["w1"]


async def test_the_cursor_never_moves_back(store: Store) -> None:
    await store.get_worker("worker-1")

    for event_id in (3, 2**40, 5):
        await store.advance_cursor("worker-1", event_id)

    assert (await store.get_worker("worker-1")).event_cursor == 2**40
