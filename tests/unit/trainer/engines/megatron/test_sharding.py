"""The grouping of datums, their copies of the model, and the cost of padding."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.datums import sft_datum
from tinsmith_trainer.engines.base import LossSpec
from tinsmith_trainer.engines.losses import prepare_loss
from tinsmith_trainer.engines.megatron.batch import (
    INPUT_IDS,
    INPUT_LENGTHS,
    LOSS_PREFIX,
    NO_ROW,
    ROW_ID,
    SAMPLE_MASK,
    TOKEN_MASK,
    Batch,
    rows_in,
)
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.sharding import (
    LEAST_FILLED_SHARE,
    equal_shards,
    rows_of_microbatch,
    shards_of,
)

BUDGET = 64

lengths_of_calls = st.lists(st.integers(1, 70), min_size=1, max_size=20)


def sharded(lengths: Sequence[int], layout: Parallelism, token_budget: int = BUDGET) -> list[list[Batch]]:
    datums = [sft_datum(length, seed) for seed, length in enumerate(lengths)]
    return shards_of(datums, prepare_loss(LossSpec("cross_entropy"), datums).arrays, layout, token_budget)


def columns(shards: list[list[Batch]]) -> int:
    """Tokens that ranks compute, padding included."""
    return sum(batch[INPUT_IDS].numel() for shard in shards for batch in shard)


@settings(deadline=None)
@given(lengths_of_calls, st.integers(1, 5), st.sampled_from([1, 2]))
def test_every_copy_of_the_model_has_a_microbatch_and_every_datum_is_in_one(
    lengths: list[int], data_parallel: int, pipeline: int
) -> None:
    shards = sharded(lengths, Parallelism(data_parallel * pipeline, pipeline=pipeline))
    assert len(shards) == data_parallel
    assert all(shards)
    dealt = [row for shard in shards for batch in shard for row in batch[ROW_ID].tolist() if row != NO_ROW]
    assert sorted(dealt) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths_of_calls, st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_a_microbatch_is_no_longer_than_its_own_longest_datum_needs(
    lengths: list[int], data_parallel: int, tensor: int, pipeline: int
) -> None:
    layout = Parallelism(data_parallel * tensor * pipeline, tensor=tensor, pipeline=pipeline)
    for shard in sharded(lengths, layout):
        for batch in (batch for batch in shard if batch[ROW_ID][0] != NO_ROW):
            assert 0 <= batch[INPUT_IDS].shape[1] - int(batch[INPUT_LENGTHS].max()) < tensor
            assert rows_in(batch) == 1 or batch[INPUT_LENGTHS].max() * rows_in(batch) <= BUDGET + rows_in(batch)
            # One column more than a datum is long.
            assert batch[INPUT_LENGTHS].min() - 1 >= LEAST_FILLED_SHARE * (batch[INPUT_LENGTHS].max() - 1)


@settings(deadline=None)
@given(lengths_of_calls, st.sampled_from([Parallelism(4, context=2), Parallelism(8, pipeline=2, context=2)]))
def test_context_ranks_get_microbatches_of_one_shape(lengths: list[int], layout: Parallelism) -> None:
    shards = sharded(lengths, layout)
    assert len({len(shard) for shard in shards}) == 1
    assert len({batch[INPUT_IDS].shape for shard in shards for batch in shard}) == 1
    filled = [sum(int((batch[ROW_ID] == NO_ROW).sum()) for batch in shard) for shard in shards]
    assert max(filled) - min(filled) <= 1


@pytest.mark.parametrize("pipeline", [1, 2])
def test_one_long_datum_does_not_make_the_short_ones_long(pipeline: int) -> None:
    lengths = [1000, *[20] * 31]
    assert columns(sharded(lengths, Parallelism(pipeline, pipeline=pipeline), 1024)) == 1001 + 31 * 21


def test_a_fifth_of_what_stages_compute_is_padding_where_one_length_for_all_rows_made_it_two_thirds() -> None:
    """Lengths as of a program's samples: many short ones and few long ones."""
    lengths = [int(32 * 64 ** (row / 63)) for row in range(64)]
    datums = [sft_datum(length, seed) for seed, length in enumerate(lengths)]
    arrays = prepare_loss(LossSpec("cross_entropy"), datums).arrays
    of_datums = sum(lengths) + len(lengths)
    padding = {
        way: 1 - of_datums / columns(way(datums, arrays, Parallelism(2, pipeline=2), 4096))
        for way in (shards_of, equal_shards)
    }
    assert padding[shards_of] < 0.2
    assert padding[equal_shards] > 0.66


@settings(deadline=None)
@given(lengths_of_calls, st.lists(st.booleans(), min_size=20, max_size=20))
def test_all_microbatches_of_a_call_have_the_same_columns(lengths: list[int], shifted: list[bool]) -> None:
    """One is general where another's datums are, since what a loss is given is decided once a call."""
    datums = [sft_datum(length, seed) for seed, length in enumerate(lengths)]
    for datum in (datum for datum, is_shifted in zip(datums, shifted, strict=False) if is_shifted):
        targets = np.append(datum.tokens[1:], datum.tokens[:1])
        datum.loss_inputs["target_tokens"] = targets  # type: ignore[index]
    arrays = prepare_loss(LossSpec("cross_entropy"), datums).arrays
    [shard] = shards_of(datums, arrays, Parallelism(), BUDGET)
    assert len({frozenset(batch) for batch in shard}) == 1


@settings(deadline=None)
@given(lengths_of_calls, st.sampled_from([2, 4]))
def test_copies_that_share_experts_have_equally_many_microbatches(lengths: list[int], data_parallel: int) -> None:
    """Each waits in every layer for tokens of the others; what fills up counts for nothing."""
    apart, together = (sharded(lengths, Parallelism(data_parallel, expert=expert)) for expert in (1, 2))
    assert {len(shard) for shard in together} == {max(map(len, apart))}
    for alone, shard in zip(apart, together, strict=True):
        assert [batch[ROW_ID].tolist() for batch in shard[: len(alone)]] == [b[ROW_ID].tolist() for b in alone]
        assert all(batch[ROW_ID].tolist() == [NO_ROW] for batch in shard[len(alone) :])


def test_a_copy_without_a_datum_computes_one_row_that_counts_for_nothing() -> None:
    [_, [idle]] = sharded([9], Parallelism(2))
    assert (idle[ROW_ID].tolist(), idle[SAMPLE_MASK].tolist(), idle[INPUT_LENGTHS].tolist()) == ([NO_ROW], [0], [1])
    assert not idle[TOKEN_MASK].any()
    assert not idle[f"{LOSS_PREFIX}weights"].any()


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 16))
def test_microbatches_of_one_shape_are_as_few_as_can_be_and_no_fuller_than_they_must_be(
    rows: int, data_parallel: int, most: int
) -> None:
    chosen = rows_of_microbatch(rows, data_parallel, most)
    share = math.ceil(rows / data_parallel)
    assert 1 <= chosen <= most
    assert math.ceil(share / chosen) == math.ceil(share / most)
    assert chosen == 1 or math.ceil(share / (chosen - 1)) > math.ceil(share / most)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_shard_does_not_carry_the_other_shards_with_it(pipeline: int) -> None:
    alone = sharded([99] * 64, Parallelism(pipeline, pipeline=pipeline))[0]
    in_four = sharded([99] * 64, Parallelism(4 * pipeline, pipeline=pipeline))[0]
    assert len(pickle.dumps(in_four)) < len(pickle.dumps(alone)) / 3


@settings(deadline=None)
@given(lengths_of_calls, st.integers(1, 5))
def test_packed_microbatches_hold_rows_of_any_length_up_to_the_budget_and_the_rows_of_a_call_together(
    lengths: list[int], first_call: int
) -> None:
    datums = [sft_datum(length, seed) for seed, length in enumerate(lengths)]
    arrays = prepare_loss(LossSpec("cross_entropy"), datums).arrays
    ends = [min(first_call, len(datums)), len(datums)]
    [shard] = shards_of(datums, arrays, Parallelism(), BUDGET, packed=True, call_ends=ends)
    rows = [batch[ROW_ID].tolist() for batch in shard]
    assert sorted(row for own in rows for row in own) == list(range(len(datums)))
    for own in rows:
        assert len(own) == 1 or sum(lengths[row] for row in own) <= BUDGET
        calls = [row >= ends[0] for row in own]
        assert calls == sorted(calls)
