"""Rows and memory become free for waiting tenants in a bounded number of moves; co-batching slows no tenant down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.builtin.claims import (
    ForwardCost,
    HeldMemory,
    co_batched_tenants,
    give_up_memory,
    gives_up_a_row,
    next_for_a_row,
)

CREDIT = 100.0
NAMES = "abcdefgh"
ROWS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 32), min_size=1)
USED = st.fixed_dictionaries({name: st.floats(0, 3 * CREDIT) for name in NAMES})
FIXED = st.sampled_from([0.0, 5.0, 256.0])


def lead_of(used: dict[str, float]) -> Callable[[str, str], float]:
    return lambda ahead, behind: used[ahead] - used[behind]


@given(ROWS, FIXED)
def test_company_takes_no_more_of_a_tenants_time_than_turns_would(rows: dict[str, int], fixed: float) -> None:
    cost = ForwardCost(fixed).of
    for tenant, own in rows.items():
        chosen = co_batched_tenants(rows, tenant, cost)
        assert tenant in chosen
        assert cost(sum(rows[one] for one in chosen)) <= len(chosen) * cost(own)


@given(ROWS, FIXED)
def test_the_tenant_with_most_rows_takes_all_others_along(rows: dict[str, int], fixed: float) -> None:
    assert co_batched_tenants(rows, max(rows, key=lambda name: rows[name]), ForwardCost(fixed).of) == set(rows)


def test_one_row_does_not_wait_for_the_thirty_one_of_another_on_a_cpu_and_does_not_notice_them_on_a_gpu() -> None:
    rows = {"flood": 31, "small": 1}
    assert co_batched_tenants(rows, "small", ForwardCost.on("cpu").of) == {"small"}
    assert co_batched_tenants(rows, "small", ForwardCost.on("cuda").of) == {"small", "flood"}


@given(ROWS, st.lists(st.sampled_from(NAMES), min_size=1, unique=True), USED)
def test_rows_move_until_no_waiting_tenant_has_two_less_and_then_stay(
    rows: dict[str, int], waiting: list[str], used: dict[str, float]
) -> None:
    held, moves = dict(rows), 0
    while True:
        for wanting in next_for_a_row(waiting, held):
            giver = gives_up_a_row(held, wanting, lead_of(used), CREDIT)
            if giver is not None:
                break
        else:
            break
        held[giver] -= 1
        held[wanting] = held.get(wanting, 0) + 1
        moves += 1
        assert moves <= 10 * sum(rows.values()), "rows go to and fro"
    most = max(held.values())
    assert all(held.get(name, 0) >= most - 1 for name in waiting if held.get(name, 0) < most)


def test_reading_keys_costs_as_much_a_byte_as_reading_weights() -> None:
    cost = ForwardCost.on("cpu", key_bytes_per_weight_byte=1 / 1000)
    assert cost.of(1, positions_read=1000) - cost.of(1) == pytest.approx(cost.of(0))


HELD = st.lists(
    st.builds(HeldMemory, st.integers(1, 100), st.integers(0, 50), st.sets(st.sampled_from("abc"), min_size=1)),
    max_size=8,
)


@given(HELD, st.integers(1, 200), st.integers(0, 200), USED)
def test_memory_is_given_up_only_by_those_ahead_and_only_if_it_is_enough(
    held: list[HeldMemory], needed: int, room: int, used: dict[str, float]
) -> None:
    leaving = give_up_memory(held, needed, room, "d", lead_of(used), CREDIT)
    gone = [held[place] for place in leaving]
    assert all(used[name] - used["d"] >= CREDIT for batch in gone for name in batch.tenants)
    assert not gone or sum(batch.nbytes for batch in gone) >= needed or len(gone) == len(held)
    assert sum(batch.filled_bytes for batch in gone) <= room


@pytest.mark.parametrize("ahead", [CREDIT - 1, CREDIT])
def test_a_tenant_that_is_a_credit_behind_gets_memory(ahead: float) -> None:
    held = [HeldMemory(10, 5, {"a"}), HeldMemory(30, 5, {"a"}), HeldMemory(30, 5, {"b"})]
    used = {"a": ahead, "b": 0.0, "d": 0.0}
    leaving = give_up_memory(held, 20, 100, "d", lead_of(used), CREDIT)
    assert leaving == ([1] if ahead >= CREDIT else [])
