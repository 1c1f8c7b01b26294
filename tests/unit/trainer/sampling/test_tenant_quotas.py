"""A tenant always finds room, and its cached entries do not evict another tenant's."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.tenant_shares import KeptResults, SharedQuota

SIZE = 1000
NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
AMOUNTS = st.integers(1, 50)


@given(st.lists(st.tuples(st.booleans(), NAMES, AMOUNTS), max_size=300))
def test_the_budget_is_never_exceeded_and_returned_bytes_can_be_used_again(acts: list[tuple[bool, str, int]]) -> None:
    room, held = SharedQuota(SIZE), list[tuple[str, int]]()
    for takes, name, amount in acts:
        if takes and room.fits(name, amount):
            room.take(name, amount)
            held.append((name, amount))
        elif not takes and held:
            room.give_back(*held.pop(0))
        assert sum(amount for _, amount in held) <= SIZE
    for name, amount in held:
        room.give_back(name, amount)
    assert room.fits("a", SIZE)


def test_a_tenant_alone_may_have_half_and_of_two_that_both_want_more_each_a_third() -> None:
    room, held = SharedQuota(SIZE), Counter[str]()
    while room.fits("a", 1):
        room.take("a", 1)
        held["a"] += 1
    assert held["a"] == SIZE // 2
    for _ in range(SIZE):
        room.give_back("a", 1)
        held["a"] -= 1
        for name in ("b", "a"):
            if room.fits(name, 1):
                room.take(name, 1)
                held[name] += 1
    assert all(abs(held[name] - SIZE // 3) <= 2 for name in "ab")


RESULTS = st.lists(st.tuples(NAMES, st.integers(1, 400)), max_size=100)


@given(RESULTS)
def test_kept_results_fit_and_the_tenant_with_most_loses_first(added: list[tuple[str, int]]) -> None:
    kept, now_kept = KeptResults(SIZE, seconds=60.0), dict[str, tuple[str, int]]()
    for number, (name, nbytes) in enumerate(added):
        kept.add(str(number), name, nbytes, now=0.0)
        now_kept[str(number)] = (name, nbytes)
        for gone in kept.forget(now=0.0):
            held = Counter[str]()
            for owner, size in now_kept.values():
                held[owner] += size
            owner, _ = now_kept.pop(gone)
            assert held[owner] == max(held.values())
            assert not any(int(other) < int(gone) for other, (name, _) in now_kept.items() if name == owner)
        assert sum(size for _, size in now_kept.values()) <= SIZE
        assert len(kept) == len(now_kept)


def test_results_of_every_tenant_are_deleted_when_they_expire() -> None:
    kept = KeptResults(SIZE, seconds=60.0)
    kept.add("old", "a", 1, now=0.0)
    kept.add("new", "b", 1, now=30.0)
    assert kept.forget(now=60.0) == []
    assert kept.forget(now=61.0) == ["old"]
    assert kept.forget(now=91.0) == ["new"]
    assert len(kept) == 0
