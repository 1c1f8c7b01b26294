"""One model per slot, one slot per model, with any number of concurrent placers."""

import asyncio
from collections import Counter
from typing import Any, get_args

import pytest
from support.server.store_records import NOW, a_model, a_session, later
from tinsmith_server.store.records import FinalState, Model, PlacementQueue, QueuedModel, SlotHolder
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

SLOTS = 3
BASE_MODEL = a_model().base_model


@pytest.fixture(autouse=True)
async def _session(store: Store) -> None:
    await store.create_session(a_session(), None)


async def waiting(store: Store, count: int) -> list[Model]:
    """Create accepted models without a place."""
    return [await store.add_model(a_model(model_seq_id=number, worker_id="")) for number in range(count)]


async def place(store: Store, model_id: str, worker_id: str, slots: int) -> bool:
    """Place the model, and return true if it got the place."""
    given = await store.place_models([BASE_MODEL], {worker_id: slots}, lambda _: {model_id: worker_id})
    assert given in ({}, {model_id: worker_id})
    return bool(given)


async def home(store: Store, model_id: str) -> str:
    model = await store.get_model(model_id)
    assert model is not None
    return model.worker_id


async def test_a_worker_takes_as_many_models_as_it_has_slots(store: Store) -> None:
    models = await waiting(store, SLOTS + 1)

    placed = [await place(store, model.model_id, "worker-1", SLOTS) for model in models]

    assert placed == [True] * SLOTS + [False]
    assert [await home(store, model.model_id) for model in models] == ["worker-1"] * SLOTS + [""]
    assert await store.used_slots() == {"worker-1": SLOTS}
    assert await store.get_model(models[-1].model_id) == models[-1]


async def test_a_model_that_got_a_place_meanwhile_is_not_ended_for_want_of_one(store: Store) -> None:
    placed, unplaced = await waiting(store, 2)
    await place(store, placed.model_id, "worker-1", SLOTS)
    await store.bind_model(placed.model_id, "worker-1")

    assert not await store.end_model(placed.model_id, "released", only_unplaced=True)
    assert await store.end_model(unplaced.model_id, "released", only_unplaced=True)

    assert (await store.models_of_worker("worker-1", ["bound"]))[0].model_id == placed.model_id
    assert await store.used_slots() == {"worker-1": 1}
    assert await store.end_model(placed.model_id, "released")
    assert await store.used_slots() == {}


async def test_many_places_are_assigned_at_once_up_to_the_limit(store: Store) -> None:
    models = await waiting(store, 2 * SLOTS)
    wanted = {model.model_id: "worker-1" for model in models[: SLOTS + 1]} | {models[-1].model_id: "worker-2"}

    given = await store.place_models([BASE_MODEL], {"worker-1": SLOTS, "worker-2": 1}, lambda _: wanted)

    first = [model.model_id for model in models[:SLOTS]]
    assert given == {**dict.fromkeys(first, "worker-1"), models[-1].model_id: "worker-2"}
    assert await store.used_slots() == {"worker-1": SLOTS, "worker-2": 1}


@pytest.mark.parametrize("state", get_args(FinalState))
async def test_the_end_of_a_model_frees_its_slot(store: Store, state: FinalState) -> None:
    first, second = await waiting(store, 2)
    await place(store, first.model_id, "worker-1", 1)
    await store.bind_model(first.model_id, "worker-1")
    assert not await place(store, second.model_id, "worker-1", 1)

    await store.end_model(first.model_id, state, "over")

    assert await place(store, second.model_id, "worker-1", 1)
    assert await home(store, first.model_id) == "worker-1"


async def test_a_refused_model_can_be_placed_elsewhere(store: Store) -> None:
    (model,) = await waiting(store, 1)
    await place(store, model.model_id, "worker-1", SLOTS)

    await store.displace_model(model.model_id, "worker-2")
    assert await store.used_slots() == {"worker-1": 1}
    await store.displace_model(model.model_id, "worker-1")
    assert await store.used_slots() == {}

    assert await place(store, model.model_id, "worker-2", SLOTS)
    assert await store.used_slots() == {"worker-2": 1}
    assert not await store.bind_model(model.model_id, "worker-1")


@pytest.mark.parametrize("slots", [SLOTS, 0])
async def test_a_model_lives_where_it_was_made_wherever_it_was_sent_meanwhile(store: Store, slots: int) -> None:
    """A model keeps the worker that made it, even where no slot is left."""
    (model,) = await waiting(store, 1)
    await place(store, model.model_id, "worker-2", SLOTS)

    assert await store.bind_to_creator(model.model_id, "worker-1", slots)
    assert await store.bind_to_creator(model.model_id, "worker-1", slots), "a repeated report"

    assert not await store.bind_model(model.model_id, "worker-2")
    made = await store.get_model(model.model_id)
    assert made is not None
    assert (made.worker_id, made.state) == ("worker-1", "bound")
    assert await store.used_slots() == ({"worker-1": 1} if slots else {})


async def test_only_one_of_several_workers_keeps_a_model_that_they_created_at_once(
    store: Store, replicas: tuple[Store, Store]
) -> None:
    (model,) = await waiting(store, 1)
    await place(store, model.model_id, "worker-1", SLOTS)
    workers = [f"worker-{number}" for number in range(6)]

    has_it = await asyncio.gather(
        *(replicas[n % 2].bind_to_creator(model.model_id, worker, SLOTS) for n, worker in enumerate(workers))
    )

    assert has_it.count(True) == 1
    assert await store.used_slots() == {workers[has_it.index(True)]: 1}


@pytest.mark.parametrize("state", get_args(FinalState))
async def test_a_model_that_has_ended_lives_nowhere(store: Store, state: FinalState) -> None:
    (model,) = await waiting(store, 1)
    await store.end_model(model.model_id, state)

    assert not await store.bind_to_creator(model.model_id, "worker-1", SLOTS)
    assert not await store.bind_to_creator("session-1:train:7", "worker-1", SLOTS)

    assert await store.used_slots() == {}


async def test_a_limit_below_the_current_use_accepts_no_more_models(store: Store) -> None:
    first, second, third = await waiting(store, 3)
    for model in (first, second):
        await place(store, model.model_id, "worker-1", 8)
    await store.end_model(first.model_id, "released")

    assert not await place(store, third.model_id, "worker-1", 1)


async def test_many_placers_at_once_never_overfill_a_worker(store: Store, replicas: tuple[Store, Store]) -> None:
    models = await waiting(store, 4 * SLOTS)
    attempts = [
        place(replica, model.model_id, worker_id, SLOTS)
        for model in models
        for worker_id in ("worker-1", "worker-2")
        for replica in replicas
    ]

    await asyncio.gather(*attempts)

    homes = Counter([await home(store, model.model_id) for model in models])
    assert homes == {"worker-1": SLOTS, "worker-2": SLOTS, "": 2 * SLOTS}
    assert await store.used_slots() == {"worker-1": SLOTS, "worker-2": SLOTS}


async def test_places_that_come_and_go_at_once_leave_a_full_worker(store: Store, replicas: tuple[Store, Store]) -> None:
    models = await waiting(store, 4 * SLOTS)
    for model in models[:SLOTS]:
        await place(store, model.model_id, "worker-1", SLOTS)
    ends = [replicas[0].end_model(model.model_id, "released") for model in models[:SLOTS]]
    attempts = [place(replicas[1], model.model_id, "worker-1", SLOTS) for model in models[SLOTS:]]

    await asyncio.gather(*ends, *attempts)

    for model in models[SLOTS:]:
        await place(store, model.model_id, "worker-1", SLOTS)
    assert await store.used_slots() == {"worker-1": SLOTS}


async def test_the_queue_shows_waiters_in_order_of_arrival_and_holders_of_places(store: Store) -> None:
    others: list[dict[str, Any]] = [{"state": "released"}, {"base_model": "b"}]
    kinds: list[dict[str, Any]] = [*others, {"created_at": later(2), "tenant": "bo"}, {"lora_rank": 4}]
    for number, fields in enumerate(kinds):
        await store.add_model(a_model(model_seq_id=number, **{"worker_id": "", "lora_rank": 8, **fields}))
    placed = await store.add_model(a_model(model_seq_id=9, worker_id=""))
    await place(store, placed.model_id, "worker-1", SLOTS)
    await store.create_session(a_session("over", tenant="eve", finished_at=NOW), None)

    assert await store.placement_queue([BASE_MODEL], ["worker-1"]) == PlacementQueue(
        waiting=(
            QueuedModel("session-1:train:3", "ada", BASE_MODEL, 4),
            QueuedModel("session-1:train:2", "bo", BASE_MODEL, 8),
        ),
        holders=(SlotHolder(placed.model_id, "session-1", "ada", "worker-1", NOW),),
        tenants_at_work=frozenset({"ada"}),
    )
    assert await store.placement_queue(["none"], ["worker-2"]) == PlacementQueue(tenants_at_work=frozenset({"ada"}))


async def test_the_second_of_two_concurrent_placements_sees_the_places_of_the_first(
    store: Store, replicas: tuple[Store, Store]
) -> None:
    """Shares between tenants hold, whichever replica assigns."""
    await waiting(store, 8)
    seen: list[PlacementQueue] = []

    def one_at_a_time(line: PlacementQueue) -> dict[str, str]:
        seen.append(line)
        return {line.waiting[0].model_id: "worker-1"} if len(line.holders) < SLOTS else {}

    await asyncio.gather(
        *(replicas[n % 2].place_models([BASE_MODEL], {"worker-1": 8}, one_at_a_time) for n in range(8))
    )

    assert sorted(len(line.holders) for line in seen) == [0, 1, 2, *[3] * 5]
    assert await store.used_slots() == {"worker-1": SLOTS}


async def test_a_tenant_sees_only_its_own_waiting_models(store: Store) -> None:
    await store.create_session(a_session("session-2", tenant="bo"), None)
    first, *_ = await waiting(store, 3)
    await store.add_model(a_model("session-2", tenant="bo"))
    await store.end_model("session-1:train:2", "released")

    assert [one.model_id for one in await store.unbound_models("ada", 9)] == ["session-1:train:0", "session-1:train:1"]
    assert await store.unbound_models("ada", 1) == [first]
