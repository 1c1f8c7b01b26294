"""The next tenant for a slot, and the message for one that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

import pytest
from support.server.store_records import NOW
from tinsmith_server.services.training.slot_assignment import Capacity, QueuePosition, assign_slots, fair_order
from tinsmith_server.store.records import PlacementQueue, QueuedModel, SlotHolder


def waiting(*who: str, rank: int = 8) -> tuple[QueuedModel, ...]:
    """Models named by tenant and number: `ada1`."""
    return tuple(QueuedModel(name, name.rstrip("0123456789"), "org/tiny", rank) for name in who)


def holding(worker_id: str = "w1", **count_of: int) -> tuple[SlotHolder, ...]:
    return tuple(
        SlotHolder(
            f"{tenant}-held{number}", f"session-{tenant}{number}", tenant, worker_id, NOW - timedelta(seconds=number)
        )
        for tenant, count in count_of.items()
        for number in range(count)
    )


def capacity(kept: int = 0, **slots: int) -> Capacity:
    return Capacity(slots=slots, suits=lambda _name, _rank: list(slots), kept=kept)


def names(queue: Iterable[QueuedModel]) -> list[str]:
    return [one.model_id for one in queue]


def test_tenants_take_turns_and_each_ones_models_come_in_the_order_of_their_arrival() -> None:
    queue = PlacementQueue(waiting("ada1", "ada2", "ada3", "bo1", "ada4", "cy1", "bo2"))
    assert names(fair_order(queue)) == ["ada1", "bo1", "cy1", "ada2", "bo2", "ada3", "ada4"]


def test_a_tenant_with_more_places_comes_after_a_tenant_with_fewer() -> None:
    queue = PlacementQueue(waiting("ada1", "ada2", "bo1", "bo2", "bo3"), holding(ada=2))
    assert names(fair_order(queue)) == ["bo1", "bo2", "ada1", "bo3", "ada2"]


def test_the_last_place_is_left_to_a_tenant_that_has_none_while_it_is_at_work() -> None:
    queue = PlacementQueue(waiting("ada1"), holding(ada=1), tenants_at_work=frozenset({"ada", "bo"}))
    assert assign_slots(queue, capacity(kept=1, w1=2)) == {}
    newcomer = PlacementQueue(waiting("ada1", "bo1"), queue.holders, queue.tenants_at_work)
    assert assign_slots(newcomer, capacity(kept=1, w1=2)) == {"bo1": "w1"}


@pytest.mark.parametrize("rounds", [1, 7])
def test_places_are_shared_alike_whether_they_come_free_at_once_or_one_by_one(rounds: int) -> None:
    left, held = waiting(*(f"ada{n}" for n in range(9)), *(f"bo{n}" for n in range(9))), holding(ada=1)
    for _ in range(rounds):
        assignments = assign_slots(PlacementQueue(left, held), capacity(w1=8 if rounds == 1 else len(held) + 1))
        held += tuple(
            SlotHolder(one.model_id, "s", one.tenant, "w1", NOW) for one in left if one.model_id in assignments
        )
        left = tuple(one for one in left if one.model_id not in assignments)
    assert Counter(holder.tenant for holder in held) == {"ada": 4, "bo": 4}


def test_a_rank_that_fits_no_free_slot_blocks_no_model_and_is_not_counted() -> None:
    queue = PlacementQueue((*waiting("ada1", rank=64), *waiting("ada2", "bo1", rank=8)))
    small = Capacity(slots={"w1": 2, "w2": 1}, suits=lambda _name, rank: ["w1"] if rank <= 8 else [])
    assert assign_slots(queue, small) == {"ada2": "w1", "bo1": "w1"}


def test_full_workers_fill_up_first_and_those_that_refused_a_model_are_asked_last() -> None:
    queue = PlacementQueue(waiting("ada1", "bo1", "cy1"), (*holding("w1", eve=1), *holding("w2", eve=2)))
    assert assign_slots(queue, capacity(w1=3, w2=3)) == {"ada1": "w2", "bo1": "w1", "cy1": "w1"}
    refused = Capacity({"w1": 3, "w2": 3}, lambda _name, _rank: ["w1", "w2"], refused_by={"ada1": {"w2"}})
    assert assign_slots(PlacementQueue(queue.waiting[:1], queue.holders), refused) == {"ada1": "w1"}


def test_a_worker_above_a_limit_that_was_lowered_gets_nothing_more() -> None:
    assert assign_slots(PlacementQueue(waiting("ada1"), holding(bo=4)), capacity(w1=2)) == {}


def sentence(wait: QueuePosition, *holders: SlotHolder, next_step: str = "ask your administrator") -> str:
    return wait.sentence(holders, next_step, NOW)


def test_a_waiter_gets_its_position_the_holders_of_the_places_and_the_next_step() -> None:
    wait = QueuePosition(3, 7, 8, "org/tiny", "ada")
    assert sentence(wait, *holding(ada=2, bo=6)) == (
        "3rd of 7 waiting for one of 8 places of org/tiny; 2 held by your sessions session-ada1, session-ada0, "
        "the first of them idle for 1 s; 6 held by other tenants; ask your administrator"
    )


def test_a_tenant_never_sees_the_ids_of_others() -> None:
    told = sentence(QueuePosition(1, 2, 8, "org/tiny", "ada"), *holding(bo=8))
    assert told == ("1st of 2 waiting for one of 8 places of org/tiny; 8 held by other tenants; ask your administrator")


def test_the_idlest_of_many_sessions_are_named() -> None:
    told = sentence(QueuePosition(1, 1, 200, "org/tiny", "ada"), *holding(ada=181))
    assert told == (
        "waiting for one of 200 places of org/tiny; 181 held by your sessions session-ada180, session-ada179, "
        "session-ada178 and 178 more, the first of them idle for 3 min; ask your administrator"
    )


@pytest.mark.parametrize(
    ("number", "written"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (121, "121st")],
)
def test_turns_are_written_as_people_say_them(number: int, written: str) -> None:
    assert sentence(QueuePosition(number, 1000, 8, "org/tiny", "ada")).startswith(f"{written} of 1000 waiting")
