import pytest
from support.server.store_records import a_model, a_session
from tinsmith_server.store.records import DeferredOperation
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

MODEL = "session-1:train:0"
ROOM = 1000


@pytest.fixture(autouse=True)
async def _models(store: Store) -> None:
    await store.create_session(a_session("session-1"), None)
    for number in range(2):
        await store.add_model(a_model(model_seq_id=number))


def operation(seq_id: int, *, model_id: str = MODEL, size: int = 10) -> DeferredOperation:
    return DeferredOperation(model_id, seq_id, "ada", size, bytes([seq_id]) * size)


async def test_deferred_operations_come_back_whole_and_in_the_order_of_their_numbers(store: Store) -> None:
    for seq_id in (7, 3, 5):
        assert await store.defer_operation(operation(seq_id), ROOM)
    found = []
    while (first := await store.first_deferred_operation(MODEL)) is not None:
        found.append(first)
        await store.delete_deferred_operation(MODEL, first.seq_id)
    assert found == [operation(3), operation(5), operation(7)]


async def test_the_first_of_two_operations_with_one_number_stays(replicas: tuple[Store, Store]) -> None:
    assert await replicas[0].defer_operation(operation(3), ROOM)
    assert await replicas[1].defer_operation(operation(3, size=11), ROOM)
    assert await replicas[1].first_deferred_operation(MODEL) == operation(3)


async def test_a_tenants_deferred_operations_share_one_space(store: Store) -> None:
    assert await store.defer_operation(operation(1, size=ROOM - 10), ROOM)
    assert not await store.defer_operation(operation(2, model_id="session-1:train:1", size=11), ROOM)
    assert await store.defer_operation(operation(2, model_id="session-1:train:1", size=10), ROOM)


async def test_only_models_with_deferred_operations_are_named(store: Store) -> None:
    await store.defer_operation(operation(3), ROOM)
    assert [model.model_id for model in await store.models_with_deferred_operations()] == [MODEL]
    assert await store.has_deferred_operations(MODEL)
    assert not await store.has_deferred_operations("session-1:train:1")
    assert (await store.is_deferred(MODEL, 3), await store.is_deferred(MODEL, 4)) == (True, False)


async def test_the_deferred_operations_of_a_model_end_with_it(store: Store) -> None:
    await store.defer_operation(operation(3), ROOM)
    await store.end_model(MODEL, "released")
    assert not await store.has_deferred_operations(MODEL)
