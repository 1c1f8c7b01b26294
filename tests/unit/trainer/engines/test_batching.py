from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.datums import VOCAB_SIZE, sft_datum, with_inputs
from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.engines.batching import (
    Microbatch,
    MicrobatchShape,
    check_tokens,
    pad,
    padded_length,
    plan_microbatches,
)
from tinsmith_trainer.errors import UserError

MAX_LENGTH = 700
BUDGET = 1024

datums = st.builds(
    sft_datum, st.integers(1, MAX_LENGTH), st.integers(0, 9), targets=st.sampled_from([None, None, 1, 3])
)


def plan(operation: list[Datum]) -> list[Microbatch]:
    return plan_microbatches(operation, max_length=MAX_LENGTH, token_budget=BUDGET)


@settings(deadline=None)
@given(st.lists(datums, max_size=40))
def test_every_datum_is_in_exactly_one_microbatch(operation: list[Datum]) -> None:
    indices = [index for microbatch in plan(operation) for index in microbatch.datum_indices]
    assert sorted(indices) == list(range(len(operation)))


@settings(deadline=None)
@given(st.lists(datums, max_size=40))
def test_a_microbatch_holds_one_length_in_datum_order_and_no_empty_rows(operation: list[Datum]) -> None:
    for microbatch in plan(operation):
        lengths = {padded_length(operation[index].length, MAX_LENGTH) for index in microbatch.datum_indices}
        assert lengths == {microbatch.shape.length}
        assert list(microbatch.datum_indices) == sorted(microbatch.datum_indices)
        assert len(microbatch.datum_indices) == microbatch.shape.rows >= 1


@settings(deadline=None)
@given(st.lists(datums, max_size=40))
def test_microbatches_are_as_large_as_the_budget_allows_but_for_the_last_of_each_length(operation: list[Datum]) -> None:
    by_length: dict[tuple[int, int | None], list[int]] = {}
    for microbatch in plan(operation):
        shape = microbatch.shape
        assert shape.rows == 1 or shape.tokens <= BUDGET
        by_length.setdefault((shape.length, shape.targets), []).append(shape.rows)
    for (length, _), rows in by_length.items():
        assert set(rows[:-1]) <= {max(1, BUDGET // length)}


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


def test_eight_datums_of_128_tokens_are_one_microbatch_without_padding() -> None:
    [microbatch] = plan([sft_datum(128, seed) for seed in range(8)])
    assert microbatch.shape == MicrobatchShape(rows=8, length=128)


@settings(deadline=None)
@given(st.lists(datums, min_size=1, max_size=12))
def test_padded_arrays_hold_each_datum_in_its_row_and_nothing_else(operation: list[Datum]) -> None:
    inputs = [{"weights": datum.loss_inputs["weights"]} for datum in operation]
    for microbatch in plan(operation):
        arrays = pad(microbatch, operation, inputs)
        assert arrays.tokens.shape == (microbatch.shape.rows, microbatch.shape.length)
        for row, index in enumerate(microbatch.datum_indices):
            datum = operation[index]
            assert np.array_equal(arrays.tokens[row, : datum.length], datum.tokens)
            assert np.array_equal(arrays.targets[row, : datum.length], datum.loss_inputs["target_tokens"])
            assert np.array_equal(arrays.loss_inputs["weights"][row, : datum.length], datum.loss_inputs["weights"])
        assert arrays.valid.sum() == sum(operation[index].length for index in microbatch.datum_indices)
        assert not arrays.tokens[~arrays.valid].any()
        assert not arrays.loss_inputs["weights"][~arrays.valid].any()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        pytest.param([], "no datums", id="nothing"),
        pytest.param([sft_datum(3), sft_datum(0)], "Datum 1 has no tokens", id="empty"),
        pytest.param([sft_datum(11)], "Datum 0 has 11 tokens.* at most 10", id="too-long"),
        pytest.param([Datum(np.array([0, 32], np.int32), sft_datum(2).loss_inputs)], "model_input.* 32;", id="token"),
        pytest.param([with_inputs(sft_datum(2), target_tokens=[0, -100])], "target_tokens.* -100;", id="target"),
    ],
)
def test_what_no_engine_can_run_is_refused(operation: list[Datum], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_tokens(operation, vocab_size=VOCAB_SIZE, max_length=10)
