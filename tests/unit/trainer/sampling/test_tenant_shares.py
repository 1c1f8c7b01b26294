"""Tenants with work get equal shares, whatever they ask for. One that returns waits for no other's backlog."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.tenant_shares import FairQueue

CREDIT = 100.0
COSTS = st.floats(0.1, CREDIT)
NAMES = st.sampled_from(["a", "b", "c", "d"])
ACTS = st.lists(st.tuples(st.sampled_from(["enter", "leave", "turn"]), NAMES, COSTS), max_size=200)


@given(st.dictionaries(NAMES, COSTS, min_size=2), st.integers(1, 300))
def test_tenants_that_stay_have_had_the_same_but_for_a_turn(costs: dict[str, float], turns_taken: int) -> None:
    turns = FairQueue(CREDIT)
    for name in costs:
        turns.enter(name)
    had = dict.fromkeys(costs, 0.0)
    for _ in range(turns_taken):
        name = turns.order()[0]
        turns.charge(name, costs[name])
        had[name] += costs[name]
    assert max(had.values()) - min(had.values()) <= max(costs.values()) + 1e-6


@given(COSTS, st.integers(0, 1000))
def test_a_new_tenant_goes_first_and_delays_the_others_by_a_credit_at_most(cost: float, turns_before: int) -> None:
    turns = FairQueue(CREDIT)
    turns.enter("flood")
    for _ in range(turns_before):
        turns.charge("flood", cost)
    turns.enter("small")
    spent = 0.0
    while turns.order()[0] == "small" and spent <= 3 * CREDIT:
        turns.charge("small", 1.0)
        spent += 1.0
    assert min(CREDIT, cost * turns_before) - 1e-3 <= spent <= CREDIT + 2.0


@given(ACTS)
def test_coming_and_going_wins_nothing(acts: list[tuple[str, str, float]]) -> None:
    """A tenant that leaves and enters at once is where it was, but where others are more than a credit ahead of it."""
    turns = FairQueue(CREDIT)
    turns.enter("stays")
    for act, name, cost in acts:
        if act == "enter":
            turns.enter(name)
        elif act == "leave":
            turns.leave(name)
        elif name in turns.order():
            turns.charge(name, cost)
    for name in turns.order():
        before = turns.lead(name, "stays")
        if name != "stays":
            turns.leave(name)
            turns.enter(name)
            assert turns.lead(name, "stays") >= min(before, -CREDIT) - 1e-6
            assert turns.lead(name, "stays") >= before - 1e-6


@given(ACTS)
def test_no_tenant_is_ever_owed_more_than_two_credits(acts: list[tuple[str, str, float]]) -> None:
    """A tenant that lacked memory for its turns must not get all turns later."""
    turns = FairQueue(CREDIT)
    turns.enter("blocked")
    for act, name, cost in acts:
        turns.enter(name)
        turns.charge(name, cost)
        if act == "leave":
            turns.leave(name)
        assert all(turns.lead(other, "blocked") <= 2 * CREDIT + 1e-6 for other in turns.order())


def test_a_tenants_use_while_alone_does_not_count_against_it_later() -> None:
    turns = FairQueue(CREDIT)
    turns.enter("early")
    turns.charge("early", 1_000_000.0)
    turns.leave("early")
    turns.enter("late")
    turns.enter("early")
    assert turns.lead("early", "late") <= CREDIT
