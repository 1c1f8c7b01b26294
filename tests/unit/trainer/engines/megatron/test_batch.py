"""Batches compared with a reference that computes one datum at a time without padding."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.datums import VOCAB_SIZE, policy_datum, sft_datum
from tinsmith_trainer.engines.base import Datum, LossSpec
from tinsmith_trainer.engines.losses import VALID, DatumResult, PreparedLoss, loss_names, prepare_loss
from tinsmith_trainer.engines.megatron.batch import (
    INPUT_IDS,
    TARGET_IDS,
    Batch,
    RowResults,
    encode,
    gather,
    is_shifted,
    row_results,
    scored,
    total_loss,
)
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.sharding import shards_of
from tinsmith_trainer.errors import ServerError
from torch import Tensor

MAX_LENGTH = 24
LAYOUTS = (
    Parallelism(),
    Parallelism(3),
    Parallelism(8, tensor=4),
    Parallelism(4, pipeline=2),
    Parallelism(12, tensor=2, context=2),
)


def with_shifted_targets(datum: Datum) -> Datum:
    """Return a datum whose targets are the next tokens, as in most training data."""
    inputs = dict(datum.loss_inputs)
    inputs["target_tokens"] = np.append(datum.tokens[1:], inputs["target_tokens"][-1]).astype(np.int64)
    return Datum(datum.tokens, inputs)


@st.composite
def datums_of(draw: st.DrawFn, loss: str) -> Datum:
    length, seed = draw(st.integers(1, MAX_LENGTH)), draw(st.integers(0, 99))
    if loss != "cross_entropy":
        datum = policy_datum(length, seed)
        sparse = datum.loss_inputs["advantages"] * (np.arange(length) >= draw(st.integers(0, length - 1)))
        datum = Datum(datum.tokens, {**datum.loss_inputs, "advantages": sparse})
    else:
        weights = draw(st.sampled_from([None, 0.0, -2.5, 1e6]))
        datum = sft_datum(length, seed, targets=draw(st.sampled_from([None, None, None, 1, 3])), weights=weights)
    shift = datum.loss_inputs["target_tokens"].ndim == 1 and draw(st.booleans())
    return with_shifted_targets(datum) if shift else datum


@st.composite
def calls(draw: st.DrawFn) -> tuple[LossSpec, list[Datum]]:
    loss = draw(st.sampled_from(loss_names()))
    return LossSpec(loss), draw(st.lists(datums_of(loss), min_size=1, max_size=9))


@dataclass
class CausalModel:
    """A logprob of a target is a function of the tokens up to it, times a weight that can be trained.

    In float64, so that the order of a sum does not show.
    """

    weight: Tensor

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        seen = (tokens.cumsum(1) * 7 + torch.arange(tokens.shape[1]) * 3)[:, : targets.shape[1]]
        seen = seen[..., None] if targets.ndim == 3 else seen
        return -(((seen + targets * 13) % 97).double() / 20 + 0.1) * self.weight


def fresh_model() -> CausalModel:
    return CausalModel(torch.tensor(1.25, dtype=torch.float64, requires_grad=True))


def plain(datums: list[Datum], loss: PreparedLoss) -> tuple[list[DatumResult], float]:
    """Datum by datum, without a batch: results, and the gradient of the weight."""
    model, results, total = fresh_model(), [], torch.zeros((), dtype=torch.float64)
    for datum, arrays in zip(datums, loss.arrays, strict=True):
        logprobs = model(
            torch.tensor(datum.tokens)[None].long(), torch.tensor(datum.loss_inputs["target_tokens"])[None]
        )
        inputs = {name: torch.tensor(values)[None] for name, values in arrays.items()}
        terms = loss(logprobs, {**inputs, VALID: torch.ones(1, datum.length, dtype=torch.bool)})
        total = total + terms.loss.sum()
        metrics = {name: float(values[0]) for name, values in terms.metrics.items()}
        results.append(DatumResult(logprobs.detach()[0].float().numpy(), float(terms.loss.detach().sum()), metrics))
    return results, gradient(total, model)


def gradient(total: Tensor, model: CausalModel) -> float:
    return float(torch.autograd.grad(total, model.weight)[0])


def on_ranks(shards: list[list[Batch]], loss: PreparedLoss) -> tuple[list[RowResults], float]:
    """Compute as ranks do: microbatch by microbatch, with added losses."""
    model, results, total = fresh_model(), [], torch.zeros((), dtype=torch.float64)
    for batch in (batch for one in shards for batch in one):
        seen = scored(batch)
        logprobs = model(batch[INPUT_IDS], seen.targets)
        terms = loss(logprobs, seen.inputs)
        results.append(row_results(batch, logprobs, terms))
        total = total + total_loss(batch, terms)
    return results, gradient(total, model)


@settings(deadline=None, max_examples=150)
@given(
    calls(),
    st.sampled_from(LAYOUTS),
    st.integers(1, 100),
    st.randoms(use_true_random=False),
)
def test_in_every_layout_each_datum_gets_the_result_that_it_gets_alone(
    call: tuple[LossSpec, list[Datum]], layout: Parallelism, token_budget: int, random: object
) -> None:
    spec, datums = call
    loss = prepare_loss(spec, datums)
    expected, expected_gradient = plain(datums, loss)

    shards = shards_of(datums, loss.arrays, layout, token_budget)
    parts, found_gradient = on_ranks(shards, loss)
    random.shuffle(parts)  # type: ignore[attr-defined]
    found = gather(parts, datums)

    assert found_gradient == pytest.approx(expected_gradient, rel=1e-9, abs=1e-9)
    for one, alone in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.logprobs, alone.logprobs)
        assert one.loss == pytest.approx(alone.loss, rel=1e-5, abs=1e-4)
        assert one.metrics == pytest.approx(alone.metrics, rel=1e-5, abs=1e-4)


@settings(deadline=None)
@given(calls(), st.sampled_from([1, 2, 8, 12]))
def test_position_i_of_the_scores_is_position_i_of_the_datum(call: tuple[LossSpec, list[Datum]], multiple: int) -> None:
    spec, datums = call
    arrays = prepare_loss(spec, datums).arrays
    batch = encode(datums, arrays, multiple_of=multiple)
    seen = scored(batch)

    assert batch[INPUT_IDS].shape[1] % multiple == 0
    for row, datum in enumerate(datums):
        length, targets = datum.length, datum.loss_inputs["target_tokens"]
        assert batch[INPUT_IDS][row, :length].tolist() == datum.tokens.tolist()
        assert trimmed(seen.targets[row], targets).tolist() == targets.tolist()
        assert seen.inputs[VALID][row].tolist() == [i < length for i in range(seen.targets.shape[1])]
        for name, values in arrays[row].items():
            assert trimmed(seen.inputs[name][row], values).tolist() == values.tolist()
            assert seen.inputs[name][row].count_nonzero() == np.count_nonzero(values)


def trimmed(row: Tensor, like: NDArray[np.generic]) -> Tensor:
    part = row[: len(like)]
    if part.ndim == 1:
        return part
    return part[:, 0] if like.ndim == 1 else part[:, : like.shape[1]]


@given(st.lists(datums_of("cross_entropy"), min_size=1, max_size=5))
def test_a_call_sends_targets_of_their_own_unless_every_datum_is_shifted(datums: list[Datum]) -> None:
    batch = encode(datums, prepare_loss(LossSpec("cross_entropy"), datums).arrays)
    assert (TARGET_IDS in batch) == (not all(is_shifted(datum) for datum in datums))


@settings(deadline=None)
@given(st.integers(1, MAX_LENGTH), st.integers(0, 99))
def test_a_shifted_datum_means_the_same_in_both_alignments(length: int, seed: int) -> None:
    datum, other = with_shifted_targets(sft_datum(length, seed)), sft_datum(MAX_LENGTH, seed + 1)
    loss = prepare_loss(LossSpec("cross_entropy"), [datum, other])
    alone = scored(encode([datum], loss.arrays[:1]))
    in_a_batch = scored(encode([datum, other], loss.arrays))
    assert alone.targets[0].tolist() == in_a_batch.targets[0, :length].tolist()
    assert alone.inputs["weights"][0].tolist() == in_a_batch.inputs["weights"][0, :length].tolist()


def results(*row_ids: int) -> RowResults:
    count = len(row_ids)
    return RowResults(torch.tensor(row_ids), torch.zeros(count, 4), torch.arange(float(count)), {})


def test_a_row_that_no_rank_returned_is_named() -> None:
    with pytest.raises(ServerError, match=r"nothing for rows \[1\] of 2"):
        gather([results(0, -1)], [sft_datum(4), sft_datum(4)])


@pytest.mark.parametrize("row_ids", [(0, 0), (0, 2), (-2, 0)])
def test_a_row_that_comes_twice_or_from_nowhere_is_refused(row_ids: tuple[int, ...]) -> None:
    with pytest.raises(ServerError, match="twice, or it is not part of the call"):
        gather([results(*row_ids)], [sft_datum(4), sft_datum(4)])


def test_results_cross_a_process_border() -> None:
    datums = [sft_datum(4)]
    there_and_back = pickle.loads(pickle.dumps(results(0)))
    assert gather([there_and_back], datums)[0].loss == 0
    assert datums[0].tokens.max() < VOCAB_SIZE
