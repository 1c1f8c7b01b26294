from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache, PrefixKey, prefix_keys

BLOCK = torch.zeros(2, 2, 1, 4, 8)
ADAPTER, OTHER_ADAPTER = 1, 2
TENANT = "ada"

tokens = st.lists(st.integers(0, 2), max_size=12)


def keys_of(ids: list[int], adapter: int = ADAPTER, tenant: str = TENANT) -> list[PrefixKey]:
    return [key for key, _ in prefix_keys(adapter, tenant, np.array(ids, np.int32), 4)]


@given(tokens, tokens)
def test_prompts_share_keys_as_far_as_their_blocks_are_equal(first: list[int], second: list[int]) -> None:
    shared = sum(a == b for a, b in zip(keys_of(first), keys_of(second), strict=False))
    blocks = [[ids[start : start + 4] for start in range(0, len(ids), 4)] for ids in (first, second)]
    expected = 0
    for a, b in zip(*blocks, strict=False):
        if a != b:
            break
        expected += 1
    assert shared == expected


def test_the_longest_known_prefix_is_found() -> None:
    cache = PrefixCache(10 * BLOCK.nbytes)
    keys = keys_of(list(range(12)))
    for key in keys[:2]:
        cache.put(key, BLOCK)
    assert len(cache.find(keys)) == 2
    assert cache.find(keys_of([5, 6])) == []


@given(st.lists(tokens, max_size=20), st.integers(0, 5))
def test_the_cap_is_never_passed(prompts: list[list[int]], blocks: int) -> None:
    cache = PrefixCache(blocks * BLOCK.nbytes)
    for prompt in prompts:
        for key in keys_of(prompt):
            cache.put(key, BLOCK)
            assert cache.used_bytes <= blocks * BLOCK.nbytes


def test_the_least_recently_used_prompt_goes_first_and_from_its_end() -> None:
    cache = PrefixCache(4 * BLOCK.nbytes)
    old, used, new = keys_of([0] * 8), keys_of([1] * 8), keys_of([2] * 4)
    for key in [*old, *used]:
        cache.put(key, BLOCK)
    cache.find(old)
    cache.find(used)
    cache.put(new[0], BLOCK)
    assert [len(cache.find(keys)) for keys in (old, used, new)] == [1, 2, 1]


def test_a_cached_block_is_a_copy() -> None:
    cache = PrefixCache(BLOCK.nbytes)
    block = torch.ones_like(BLOCK)
    cache.put(keys_of([1])[0], block)
    block.zero_()
    assert cache.find(keys_of([1]))[0].min() == 1


def test_forgetting_an_adapter_version_frees_its_blocks_only() -> None:
    cache = PrefixCache(10 * BLOCK.nbytes)
    for adapter in (ADAPTER, OTHER_ADAPTER):
        for key in keys_of(list(range(8)), adapter):
            cache.put(key, BLOCK)
    cache.forget(ADAPTER)
    assert cache.used_bytes == 2 * BLOCK.nbytes
    assert cache.find(keys_of(list(range(8)))) == []
    assert len(cache.find(keys_of(list(range(8)), OTHER_ADAPTER))) == 2
