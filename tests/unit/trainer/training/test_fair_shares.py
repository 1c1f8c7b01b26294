"""Equal shares for waiting tenants, no credit for idle ones, and a short wait for newcomers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_trainer.training.fair_shares import HEAD_START_TOKENS, LEAST_TOKENS, Contender, FairShares, Pace

TENANTS = "ABCD"
MOST = 4096
COSTS = st.integers(LEAST_TOKENS, MOST)


class Engine:
    """Runs turns, and notes what each tenant and model has had."""

    def __init__(self) -> None:
        self.turns = FairShares()
        self.had: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()

    def turn(self, waiting: Mapping[str, int], tenants: Mapping[str, str] | None = None) -> str:
        """One, of models (named after their tenant's letter) with the costs of their next turns. Whose it was."""
        who = self.turns.next([Contender((tenants or {}).get(model, model[0]), model) for model in waiting])
        self.turns.charge(who, waiting[who.model_id])
        self.had[who.tenant] += waiting[who.model_id]
        self.by_model[who.model_id] += waiting[who.model_id]
        return who.model_id


@given(st.lists(st.lists(COSTS, min_size=4, max_size=4), min_size=1, max_size=30))
def test_no_permanent_waiter_is_ahead_by_more_than_one_turn(rounds: list[list[int]]) -> None:
    engine = Engine()
    longest = max(cost for costs in rounds for cost in costs)
    for costs in rounds:
        engine.turn(dict(zip(TENANTS, costs, strict=True)))
        had = [engine.had[tenant] for tenant in TENANTS]
        assert max(had) - min(had) <= longest


@given(
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    st.lists(st.lists(COSTS, min_size=4, max_size=4), min_size=1, max_size=30),
)
def test_permanent_waiters_get_tokens_by_their_weights(weights: list[float], rounds: list[list[int]]) -> None:
    engine = Engine()
    weight_of = dict(zip(TENANTS, weights, strict=True))
    for tenant, weight in weight_of.items():
        engine.turns.weigh(tenant, weight)
    longest = max(cost / weight_of[tenant] + 1 for costs in rounds for tenant, cost in zip(TENANTS, costs, strict=True))
    for costs in rounds:
        engine.turn(dict(zip(TENANTS, costs, strict=True)))
        had = [engine.had[tenant] / weight_of[tenant] for tenant in TENANTS]
        assert max(had) - min(had) <= longest + len(rounds)  # each charge is rounded


def test_a_weight_that_is_taken_back_leaves_equal_shares() -> None:
    engine = Engine()
    engine.turns.weigh("A", 10.0)
    engine.turns.weigh("A", 1.0)
    turns = [engine.turn({"A": 100, "B": 100}) for _ in range(10)]
    assert Counter(turns) == {"A": 5, "B": 5}


@settings(max_examples=20)
@given(st.data())
def test_no_model_starves(data: st.DataObject) -> None:
    """Between two turns of A's each of the others has at most A's latest turn, one of its own, and its start."""
    engine = Engine()
    engine.turn({"A": data.draw(COSTS)})
    before = engine.had.copy()
    for _ in range(20):
        others = data.draw(st.dictionaries(st.sampled_from("BCD"), COSTS))
        if engine.turn({"A": data.draw(COSTS), **others}) == "A":
            before = engine.had.copy()
        assert all(engine.had[other] - before[other] <= 2 * MOST + HEAD_START_TOKENS for other in "BCD")


@given(st.lists(st.tuples(COSTS, st.integers(LEAST_TOKENS, 1024)), min_size=1, max_size=60))
def test_a_model_in_the_turn_of_another_is_charged_and_never_far_ahead(turns: list[tuple[int, int]]) -> None:
    engine = Engine()
    contenders = [Contender(tenant, f"{tenant}1") for tenant in "AB"]
    for cost, tokens_along in turns:
        chosen = engine.turns.next(contenders)
        shares = [(chosen, cost)]
        for other in engine.turns.cobatch_candidates(chosen, contenders):
            assert other != chosen
            shares.append((other, tokens_along))
        for who, tokens in shares:
            engine.turns.charge(who, tokens)
            engine.had[who.tenant] += tokens
        assert abs(engine.had["A"] - engine.had["B"]) <= MOST + HEAD_START_TOKENS


def test_an_additional_model_does_not_lengthen_short_turns() -> None:
    engine = Engine()
    small, large = Contender("A", "A1"), Contender("B", "B1")
    for _ in range(600):
        chosen = engine.turns.next([small, large])
        along = engine.turns.cobatch_candidates(chosen, [small, large])
        for who in (chosen, *along):
            tokens = 16 if who is small else 512
            engine.turns.charge(who, tokens)
            engine.had[who.tenant] += tokens
    assert abs(engine.had["A"] - engine.had["B"]) <= HEAD_START_TOKENS + 512


def test_models_of_a_tenant_with_the_least_time_are_added_first() -> None:
    engine = Engine()
    models = [Contender("A", f"A{number}") for number in range(4)]
    for tokens in (40, 30, 20):
        engine.turns.charge(engine.turns.next(models), tokens)
    chosen = engine.turns.next(models)
    assert [one.model_id for one in (chosen, *engine.turns.cobatch_candidates(chosen, models))] == [
        "A3",
        "A2",
        "A1",
        "A0",
    ]


def test_a_newcomers_step_follows_its_gradient_before_another_has_a_turn() -> None:
    engine = Engine()
    engine.turn({"A": 1024})
    assert engine.turn({"A": 1024, "B": 1024}) == "B"
    assert engine.turn({"A": 1024, "B": 64}) == "B"
    assert [engine.turn({"A": 1024, "B": 1024}) for _ in range(3)] == ["B", "A", "B"]


def test_use_without_competition_is_not_held_against_a_tenant() -> None:
    engine = Engine()
    engine.turn({"A": 10**9})
    assert [engine.turn({"A": 1024, "B": 1024}) for _ in range(6)] == ["B", "B", "A", "B", "A", "B"]


def test_usage_while_others_waited_still_counts_after_a_tenant_returns() -> None:
    engine = Engine()
    assert engine.turn({"A": 10_000, "B": 1000}) == "A"
    assert engine.turn({"B": 1000}) == "B"
    assert [engine.turn({"A": 1000, "B": 1000}) for _ in range(10)] == [*["B"] * 9, "A"]


def test_a_stream_of_newcomers_does_not_delay_earlier_tenants_and_leaves_no_state_behind() -> None:
    turns = FairShares()
    turns_of = Counter[str]()
    for number in range(500):
        chosen = turns.next([Contender(f"new-{number}", "m"), Contender("stays", "m")])
        turns.charge(chosen, 1024)
        turns_of[chosen.tenant] += 1
    assert turns_of["stays"] == 250
    assert len(turns._models) <= 3


@pytest.mark.parametrize(("seconds", "tokens"), [(0.5, 500), (-0.1, 0)])
def test_seconds_without_tokens_cost_the_tokens_of_that_time(seconds: float, tokens: int) -> None:
    pace = Pace()
    assert pace.worth(seconds) == 0, "nothing is known yet"
    pace.note(2000, 2.0)
    assert pace.worth(seconds) == tokens
