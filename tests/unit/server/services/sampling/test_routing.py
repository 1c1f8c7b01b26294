"""Samples go where their caches are warm, as long as that is fair to everybody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.sampling.routing import (
    BUSIER_FACTOR,
    FEW_SAMPLES,
    FIRST_BLOCK_TOKENS,
    Load,
    busy_bound,
    cache_key,
    preference,
)

keys = st.binary(max_size=40)
names = st.lists(st.uuids().map(str), min_size=1, max_size=12, unique=True)
counts = st.integers(0, 10_000)
loads = names.flatmap(lambda ids: st.tuples(*(st.builds(Load, st.just(one), counts) for one in ids)).map(list))


def idle(ids: list[str]) -> list[Load]:
    return [Load(one, 0) for one in ids]


@given(st.lists(keys, max_size=20), names, st.data())
def test_a_sampler_that_goes_moves_only_its_own_keys(some: list[bytes], ids: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(ids))
    for key in some:
        before = preference(key, idle(ids))
        assert preference(key, idle([one for one in ids if one != gone])) == [one for one in before if one != gone]


@given(keys, loads)
def test_a_sampler_that_is_far_busier_than_the_others_is_asked_after_them(key: bytes, given: list[Load]) -> None:
    bound = busy_bound([load.unfinished for load in given])
    unfinished = {load.sampler_id: load.unfinished for load in given}
    first = preference(key, given)[0]
    assert unfinished[first] < bound
    busy = [unfinished[one] >= bound for one in preference(key, given)]
    assert busy == sorted(busy)


@given(keys, names, st.integers(1, 400))
def test_samples_that_begin_alike_never_pile_up_beyond_the_bound(key: bytes, ids: list[str], samples: int) -> None:
    unfinished = dict.fromkeys(ids, 0)
    for _ in range(samples):
        taken_by = preference(key, [Load(one, unfinished[one]) for one in ids])[0]
        unfinished[taken_by] += 1
    assert max(unfinished.values()) <= max(FEW_SAMPLES, BUSIER_FACTOR * (samples + 1) / len(ids) + 1)


@given(keys, names)
def test_the_samples_of_a_group_stay_together(key: bytes, ids: list[str]) -> None:
    """A program that wants 16 answers to one prompt asks for them one by one."""
    unfinished = dict.fromkeys(ids, 0)
    for _ in range(16):
        unfinished[preference(key, [Load(one, unfinished[one]) for one in ids])[0]] += 1
    assert sorted(unfinished.values())[-1] == 16


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_prompts_that_differ_after_their_first_block_share_a_sampler(one: bytes, other: bytes) -> None:
    block = bytes(4 * FIRST_BLOCK_TOKENS)
    assert cache_key("digest", block + one) == cache_key("digest", block + other)
    assert cache_key("digest", block) != cache_key("another", block)
