from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.datums import VOCAB_SIZE, sft_datum, with_inputs
from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.engines.batching import (
    CELLS_PER_TOKEN,
    OPEN_GROUPS,
    PACKED_BELOW_TOKENS,
    Microbatch,
    check_tokens,
    padded_length,
    plan_microbatches,
)
from tinsmith_trainer.errors import UserError

MAX_LENGTH = 700
BUDGET = 1024

datums = st.builds(
    sft_datum, st.integers(1, MAX_LENGTH), st.integers(0, 9), targets=st.sampled_from([None, None, 1, 3])
)


def plan(operation: list[Datum], *, packs: bool = False) -> list[Microbatch]:
    return plan_microbatches(
        operation, max_length=MAX_LENGTH, token_budget=BUDGET, packs_below=packs * PACKED_BELOW_TOKENS
    )


@settings(deadline=None)
@given(st.lists(datums, max_size=40), st.booleans())
def test_every_datum_is_in_exactly_one_microbatch(operation: list[Datum], packs: bool) -> None:
    indices = [index for microbatch in plan(operation, packs=packs) for index in microbatch.datum_indices]
    assert sorted(indices) == list(range(len(operation)))


@settings(deadline=None)
@given(st.lists(datums, max_size=40))
def test_packed_datums_are_shorter_than_the_bound_and_compute_no_padding(operation: list[Datum]) -> None:
    for microbatch in plan(operation, packs=True):
        lengths = tuple(operation[index].length for index in microbatch.datum_indices)
        assert microbatch.shape.packed == (max(lengths) < PACKED_BELOW_TOKENS)
        if microbatch.shape.packed:
            assert microbatch.shape.lengths == lengths == tuple(sorted(lengths))


@settings(deadline=None)
@given(datums, st.lists(datums, max_size=10))
def test_the_products_of_a_datum_depend_only_on_its_own_length(datum: Datum, others: list[Datum]) -> None:
    def product_tokens(operation: list[Datum]) -> int:
        [own] = [one for one in plan(operation, packs=True) if 0 in one.datum_indices]
        return own.shape.product_tokens

    assert product_tokens([datum, *others]) == product_tokens([datum])


@settings(deadline=None)
@given(st.lists(datums, max_size=40), st.booleans())
def test_microbatches_keep_to_the_budget_and_no_two_would_be_one(operation: list[Datum], packs: bool) -> None:
    by_kind: dict[tuple[int, int | None, int | None], list[Microbatch]] = {}
    for microbatch in plan(operation, packs=packs):
        shape = microbatch.shape
        assert shape.rows == 1 or shape.tokens <= BUDGET
        kind = (shape.product_tokens, None if shape.packed else shape.width, shape.targets)
        by_kind.setdefault(kind, []).append(microbatch)
    for microbatches in by_kind.values():
        pairs = itertools.combinations(microbatches if len(microbatches) <= OPEN_GROUPS else [], 2)
        for one, other in pairs:
            cells = (one.shape.rows + other.shape.rows) * max(one.shape.width, other.shape.width)
            assert one.shape.tokens + other.shape.tokens > BUDGET or cells > CELLS_PER_TOKEN * BUDGET


@settings(deadline=None)
@given(st.lists(datums, max_size=40), st.booleans())
@pytest.mark.slow("draws many batches")
def test_the_losses_rows_are_bounded_for_any_lengths(operation: list[Datum], packs: bool) -> None:
    odd = [*operation, *(sft_datum(1) for _ in range(900)), sft_datum(127)]
    for microbatch in plan(odd, packs=packs):
        shape = microbatch.shape
        assert shape.rows == 1 or shape.rows * shape.width <= CELLS_PER_TOKEN * BUDGET


@pytest.mark.parametrize(
    ("length", "padded"),
    [
        (1, 16),
        (16, 16),
        (17, 32),
        (33, 48),
        (64, 64),
        (65, 80),
        (97, 112),
        (129, 160),
        (257, 320),
        (513, 640),
        (641, 700),
    ],
)
def test_lengths_go_up_to_the_grid_and_never_above_the_models_limit(length: int, padded: int) -> None:
    assert padded_length(length, MAX_LENGTH) == padded


@given(st.integers(1, 100_000))
def test_padding_costs_at_most_a_quarter_of_the_length_above_the_shortest(length: int) -> None:
    padded = padded_length(length, 2**20)
    assert length <= padded <= max(1.25 * length, length + 15)


@settings(deadline=None)
@given(st.lists(datums, min_size=1, max_size=40), st.integers(1, MAX_LENGTH))
def test_no_datum_is_computed_beyond_the_length_behind_which_its_angles_change(
    operation: list[Datum], behind: int
) -> None:
    """transformers turns all rows of a forward by the longest one, padding included."""
    microbatches = plan_microbatches(operation, max_length=MAX_LENGTH, token_budget=BUDGET, angles_change_after=behind)
    for microbatch in microbatches:
        are_short = {operation[index].length <= behind for index in microbatch.datum_indices}
        assert are_short == {microbatch.shape.width <= behind}


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        pytest.param([], "no datums", id="nothing"),
        pytest.param([sft_datum(3), sft_datum(0)], "Datum 1 has no tokens", id="empty"),
        pytest.param([sft_datum(11)], "Datum 0 has 11 tokens; the limit of this model is 10", id="too-long"),
        pytest.param([Datum(np.array([0, 32], np.int32), sft_datum(2).loss_inputs)], "model_input.* 32;", id="token"),
        pytest.param([with_inputs(sft_datum(2), target_tokens=[0, -100])], "target_tokens.* -100,", id="target"),
    ],
)
def test_work_that_no_engine_can_run_is_refused(operation: list[Datum], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_tokens(operation, vocab_size=VOCAB_SIZE, max_length=10)


@pytest.mark.parametrize("shape", [(5,), (5, 2)], ids=["one target", "two targets"])
def test_labels_that_transformers_ignores_get_an_error_that_explains_masks(shape: tuple[int, ...]) -> None:
    labels = np.full(shape, 3, np.int64)
    labels[2:4] = -100
    with pytest.raises(UserError, match=r"target_tokens holds -100.* 0 in `weights`") as refused:
        check_tokens([with_inputs(sft_datum(5, 0), target_tokens=labels)], vocab_size=VOCAB_SIZE, max_length=10)
    assert "tokenizer" not in str(refused.value)
