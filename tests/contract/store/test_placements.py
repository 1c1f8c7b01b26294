"""One model per slot, one slot per model, whoever places them and however many at once."""

import asyncio
from collections import Counter
from typing import Any, get_args

import pytest
from support.server.store_records import a_model, a_session, later
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import FinalState, Model

SLOTS = 3


@pytest.fixture(autouse=True)
async def _session(store: Store) -> None:
    await store.create_session(a_session(), None)


async def waiting(store: Store, count: int) -> list[Model]:
    """Accepted models that nobody has placed."""
    return [await store.add_model(a_model(model_seq_id=number, worker_id="")) for number in range(count)]


async def test_a_worker_takes_as_many_models_as_it_has_slots(store: Store) -> None:
    models = await waiting(store, SLOTS + 1)

    placed = [await store.place_model(model.model_id, "worker-1", SLOTS) for model in models]

    assert [model.worker_id if model else None for model in placed] == ["worker-1"] * SLOTS + [None]
    assert await store.used_slots() == {"worker-1": SLOTS}
    assert await store.get_model(models[-1].model_id) == models[-1]


async def test_a_model_that_got_a_place_meanwhile_is_not_ended_for_want_of_one(store: Store) -> None:
    placed, unplaced = await waiting(store, 2)
    await store.place_model(placed.model_id, "worker-1", SLOTS)
    await store.bind_model(placed.model_id, "worker-1")

    assert not await store.end_model(placed.model_id, "released", only_unplaced=True)
    assert await store.end_model(unplaced.model_id, "released", only_unplaced=True)

    assert (await store.models_of_worker("worker-1", ["bound"]))[0].model_id == placed.model_id
    assert await store.used_slots() == {"worker-1": 1}
    assert await store.end_model(placed.model_id, "released")
    assert await store.used_slots() == {}


async def test_a_model_that_is_placed_stays_there(store: Store) -> None:
    (model,) = await waiting(store, 1)
    placed = await store.place_model(model.model_id, "worker-1", SLOTS)

    assert await store.place_model(model.model_id, "worker-1", SLOTS) == placed
    assert await store.place_model(model.model_id, "worker-2", SLOTS) == placed
    assert await store.used_slots() == {"worker-1": 1}


async def test_a_worker_that_counts_itself_takes_any_number(store: Store) -> None:
    placed = [await store.place_model(model.model_id, "worker-1", None) for model in await waiting(store, 5)]

    assert [model.worker_id for model in placed if model] == ["worker-1"] * 5
    assert await store.used_slots() == {}


@pytest.mark.parametrize("state", get_args(FinalState))
async def test_the_end_of_a_model_frees_its_slot(store: Store, state: FinalState) -> None:
    first, second = await waiting(store, 2)
    await store.place_model(first.model_id, "worker-1", 1)
    await store.bind_model(first.model_id, "worker-1")
    assert await store.place_model(second.model_id, "worker-1", 1) is None

    await store.end_model(first.model_id, state, "over")

    assert await store.place_model(second.model_id, "worker-1", 1) is not None
    ended = await store.get_model(first.model_id)
    assert ended is not None
    assert ended.worker_id == "worker-1"


async def test_a_model_that_has_ended_is_not_placed(store: Store) -> None:
    (model,) = await waiting(store, 1)
    await store.end_model(model.model_id, "released")

    ended = await store.place_model(model.model_id, "worker-1", SLOTS)

    assert ended is not None
    assert (ended.state, ended.worker_id) == ("released", "")
    assert await store.used_slots() == {}


async def test_a_refused_model_can_be_placed_elsewhere(store: Store) -> None:
    (model,) = await waiting(store, 1)
    await store.place_model(model.model_id, "worker-1", SLOTS)

    await store.displace_model(model.model_id, "worker-2")
    assert await store.used_slots() == {"worker-1": 1}
    await store.displace_model(model.model_id, "worker-1")
    assert await store.used_slots() == {}

    assert await store.place_model(model.model_id, "worker-2", SLOTS) is not None
    assert await store.used_slots() == {"worker-2": 1}
    assert not await store.bind_model(model.model_id, "worker-1")


@pytest.mark.parametrize("slots", [SLOTS, 0, None])
async def test_a_model_lives_where_it_was_made_wherever_it_was_sent_meanwhile(store: Store, slots: int | None) -> None:
    """Also where no slot is left, or where the worker counts itself."""
    (model,) = await waiting(store, 1)
    await store.place_model(model.model_id, "worker-2", SLOTS)

    assert await store.bind_where_made(model.model_id, "worker-1", slots)
    assert await store.bind_where_made(model.model_id, "worker-1", slots), "it is told again"

    assert not await store.bind_model(model.model_id, "worker-2")
    made = await store.get_model(model.model_id)
    assert made is not None
    assert (made.worker_id, made.state) == ("worker-1", "bound")
    assert await store.used_slots() == ({"worker-1": 1} if slots else {})


async def test_a_model_that_lives_at_its_place_keeps_its_slot(store: Store) -> None:
    (model,) = await waiting(store, 1)
    await store.place_model(model.model_id, "worker-1", SLOTS)

    assert await store.bind_where_made(model.model_id, "worker-1", SLOTS)

    assert await store.used_slots() == {"worker-1": 1}


async def test_of_workers_that_made_the_same_model_at_once_one_has_it(
    store: Store, replicas: tuple[Store, Store]
) -> None:
    (model,) = await waiting(store, 1)
    await store.place_model(model.model_id, "worker-1", SLOTS)
    workers = [f"worker-{number}" for number in range(6)]

    has_it = await asyncio.gather(
        *(replicas[n % 2].bind_where_made(model.model_id, worker, SLOTS) for n, worker in enumerate(workers))
    )

    assert has_it.count(True) == 1
    assert await store.used_slots() == {workers[has_it.index(True)]: 1}


@pytest.mark.parametrize("state", get_args(FinalState))
async def test_a_model_that_has_ended_lives_nowhere(store: Store, state: FinalState) -> None:
    (model,) = await waiting(store, 1)
    await store.end_model(model.model_id, state)

    assert not await store.bind_where_made(model.model_id, "worker-1", SLOTS)
    assert not await store.bind_where_made("session-1:train:7", "worker-1", SLOTS)

    assert await store.used_slots() == {}


async def test_a_bound_model_keeps_its_place(store: Store) -> None:
    (model,) = await waiting(store, 1)
    await store.place_model(model.model_id, "worker-1", SLOTS)
    await store.bind_model(model.model_id, "worker-1")

    await store.displace_model(model.model_id, "worker-1")

    assert await store.used_slots() == {"worker-1": 1}


async def test_a_limit_lowered_below_what_is_placed_takes_nothing_more(store: Store) -> None:
    first, second, third = await waiting(store, 3)
    for model in (first, second):
        await store.place_model(model.model_id, "worker-1", 8)
    await store.end_model(first.model_id, "released")

    assert await store.place_model(third.model_id, "worker-1", 1) is None


async def test_a_model_that_nobody_knows_is_placed_nowhere(store: Store) -> None:
    assert await store.place_model("session-1:train:7", "worker-1", SLOTS) is None
    assert await store.used_slots() == {}


async def test_many_placers_at_once_never_overfill_a_worker(store: Store, replicas: tuple[Store, Store]) -> None:
    models = await waiting(store, 4 * SLOTS)
    attempts = [
        replica.place_model(model.model_id, worker_id, SLOTS)
        for model in models
        for worker_id in ("worker-1", "worker-2")
        for replica in replicas
    ]

    placed = [model for model in await asyncio.gather(*attempts) if model is not None]

    where = {model.model_id: {one.worker_id for one in placed if one.model_id == model.model_id} for model in placed}
    assert all(len(workers) == 1 for workers in where.values())
    homes = Counter(next(iter(workers)) for workers in where.values())
    assert homes == await store.used_slots() == {"worker-1": SLOTS, "worker-2": SLOTS}


async def test_places_that_come_and_go_at_once_leave_a_full_worker(store: Store, replicas: tuple[Store, Store]) -> None:
    models = await waiting(store, 4 * SLOTS)
    for model in models[:SLOTS]:
        await store.place_model(model.model_id, "worker-1", SLOTS)
    ends = [replicas[0].end_model(model.model_id, "released") for model in models[:SLOTS]]
    attempts = [replicas[1].place_model(model.model_id, "worker-1", SLOTS) for model in models[SLOTS:]]

    await asyncio.gather(*ends, *attempts)

    for model in models[SLOTS:]:
        await store.place_model(model.model_id, "worker-1", SLOTS)
    assert await store.used_slots() == {"worker-1": SLOTS}


async def test_the_first_without_a_place_is_the_oldest_of_its_kind(store: Store) -> None:
    await store.create_session(a_session(), None)
    others: list[dict[str, Any]] = [{"worker_id": "w1"}, {"state": "released"}, {"lora_rank": 4}, {"base_model": "b"}]
    kinds: list[dict[str, Any]] = [*others, {"created_at": later(2)}, {"created_at": later(1)}]
    for number, fields in enumerate(kinds):
        await store.add_model(a_model(model_seq_id=number, **{"worker_id": "", "lora_rank": 8, **fields}))
    first = await store.first_without_place(a_model().base_model, 8)
    assert first is not None
    assert first.model_seq_id == 5
    assert await store.first_without_place("none", 8) is None
