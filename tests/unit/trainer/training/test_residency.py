"""The choice of adapters to evict: idle ones first, busy ones only after a turn; progress is guaranteed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.training.residency import Residency, ResidencyRules, Stay

RULES = ResidencyRules()
NOW = 1000.0

ages = st.sampled_from([0.0, 0.1, 0.24, 0.25, 0.26, 0.5, 1.9, 2.0, 2.1, 9.0, 60.0, 900.0])
tenants = st.sampled_from(["ada", "ben", "cy"])
kinds = st.tuples(
    tenants, ages, ages, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.0, NOW - 1, NOW + 1, NOW + 50])
)


def stay_of(name: int, tenant: str, age: float, unused: float, busy: bool, pinned: bool, not_before: float) -> Stay:
    return Stay(f"m{name}", tenant, NOW - age, NOW - min(unused, age), busy, pinned, not_before)


@st.composite
def some_residency(draw: st.DrawFn) -> Residency:
    stays = [stay_of(name, *kind) for name, kind in enumerate(draw(st.lists(kinds, max_size=6)))]
    seconds = draw(st.sampled_from([0.0, 0.05, 0.3, 2.5]))
    return Residency(stays, NOW, seconds, RULES, draw(tenants), is_new=draw(st.booleans()))


residencies = some_residency()


@given(residencies)
def test_the_least_recently_used_idle_model_is_evicted(residency: Residency) -> None:
    leaver = residency.leaver()
    unused = [
        stay
        for stay in residency.stays
        if not (stay.busy or stay.pinned)
        and stay.not_before <= NOW
        and stay.used_at + max(RULES.idle_seconds, residency.exchange_seconds) <= NOW
    ]
    if unused:
        assert leaver is not None
        assert leaver.used_at == min(stay.used_at for stay in unused)


@given(residencies)
def test_a_model_with_work_keeps_its_turn(residency: Residency) -> None:
    leaver = residency.leaver()
    if leaver is not None and leaver.busy:
        assert leaver.since + RULES.turn_seconds <= NOW
        held = Counter(stay.tenant for stay in residency.stays)
        if not residency.is_new and held[leaver.tenant] <= held[residency.tenant] + 1:
            share = RULES.exchange_share * residency.exchange_seconds * len(residency.stays)
            assert leaver.since + share <= NOW


@given(residencies)
def test_a_busy_model_is_not_evicted_for_a_larger_tenant_that_could_evict_its_own_model(
    residency: Residency,
) -> None:
    leaver = residency.leaver()
    if leaver is not None and leaver.busy and leaver.tenant != residency.tenant:
        held = Counter(stay.tenant for stay in residency.stays)
        own = [stay for stay in residency.stays if stay.tenant == residency.tenant]
        if any(alone(residency, stay) for stay in own):
            assert held[leaver.tenant] > held[residency.tenant]


def alone(residency: Residency, stay: Stay) -> bool:
    """Return whether the model would leave if the others were busy."""
    others = [replace(other, pinned=other.model_id != stay.model_id) for other in residency.stays]
    return replace(residency, stays=others).leaver() == stay


@given(residencies)
def test_a_new_model_never_waits_longer_than_a_restored_one(residency: Residency) -> None:
    new, other = (replace(residency, is_new=is_new) for is_new in (True, False))
    assert new.seconds_until_one_leaves() <= other.seconds_until_one_leaves()


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("exchange_seconds", [0.01, 1.0])
def test_every_busy_model_gets_its_turns_and_swaps_keep_their_share(slots: int, exchange_seconds: float) -> None:
    """More models than slots that never run out of work, over half an hour of their engine."""
    now, moves, waiting = 0.0, 0, [f"m{number}" for number in range(3 * slots)]
    here: dict[str, float] = {}
    came = dict.fromkeys(waiting, 0)
    while now < 1800:
        stays = [Stay(model_id, model_id, since, now, busy=True) for model_id, since in here.items()]
        residency = Residency(stays, now, exchange_seconds, RULES, "other")
        leaver = residency.leaver()
        if len(here) < slots or leaver is not None:
            if leaver is not None and len(here) == slots:
                del here[leaver.model_id]
                waiting.append(leaver.model_id)
            now += exchange_seconds
            moves += 1
            comes = waiting.pop(0)
            here[comes] = now
            came[comes] += 1
        else:
            now += residency.seconds_until_one_leaves() + 1e-6
    assert max(came.values()) - min(came.values()) <= 1
    assert moves * exchange_seconds <= 1800 / (RULES.exchange_share - 1)


def test_a_tenant_with_many_busy_models_gives_slots_up_until_another_has_as_many() -> None:
    """Each keeps its slot for a short turn, whatever exchanges cost, and gives up no more than needed."""
    here = ["ada"] * 8
    for _ in range(20):
        stays = [Stay(f"m{number}", tenant, NOW - 3, NOW, busy=True) for number, tenant in enumerate(here)]
        leaver = Residency(stays, NOW, 10.0, RULES, "ben").leaver()
        if leaver is None:
            break
        here.remove(leaver.tenant)
        here.append("ben")
    assert Counter(here) == {"ada": 4, "ben": 4}
