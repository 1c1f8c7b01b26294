"""Gradients add up until the next step, and only those of calls that succeeded."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.contract import (
    CROSS_ENTROPY,
    IMPORTANCE_SAMPLING,
    advance_all,
    forward,
    forward_backward,
    gradients,
    spec,
    state_bits,
    train,
)
from support.engine.datums import policy_datum, sft_datum, with_inputs
from tinsmith_trainer.engines.base import AdamParams, Datum, Engine, LossSpec, Work
from tinsmith_trainer.errors import UserError

pytestmark = pytest.mark.core

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 33, 5))]
TOO_HIGH_AN_ID = with_inputs(sft_datum(4), target_tokens=[0, 1, 2, 10**6])


@pytest.mark.core("Engine.start", "Engine.finish")
def test_loss_is_the_plain_sum_over_all_tokens(engine: Engine) -> None:
    outcome = forward_backward(engine, DATUMS)

    by_hand = -sum(float(output["logprobs"].astype(np.float64).sum()) for output in outcome.outputs)
    assert outcome.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)


def test_successive_calls_add_up(engine: Engine, division_rounding: float) -> None:
    train(engine, DATUMS)
    forward_backward(engine, DATUMS)
    whole = gradients(engine)
    engine.clear_gradients("a")

    forward_backward(engine, DATUMS[:2])
    forward_backward(engine, DATUMS[2:])

    for name, gradient in gradients(engine).items():
        atol = division_rounding * np.abs(whole[name]).max()
        np.testing.assert_allclose(gradient, whole[name], rtol=0, atol=atol, err_msg=name)


def test_forward_only_adds_nothing_and_answers_the_same(engine: Engine) -> None:
    before = state_bits(engine.state("a"))

    only_forward = forward(engine, DATUMS)

    assert state_bits(engine.state("a")) == before
    assert repr(only_forward.outputs) == repr(forward_backward(engine, DATUMS).outputs)
    assert (only_forward.trained_tokens, only_forward.input_tokens) == (0, 75)


@pytest.mark.core("Engine.clear_gradients")
def test_cleared_gradients_are_gone_and_nothing_else(engine: Engine) -> None:
    train(engine, DATUMS)
    before = state_bits(engine.state("a"))
    forward_backward(engine, DATUMS)

    engine.clear_gradients("a")

    assert state_bits(engine.state("a")) == before


@pytest.mark.parametrize(
    ("datums", "loss"),
    [
        pytest.param([*DATUMS, TOO_HIGH_AN_ID], CROSS_ENTROPY, id="target-out-of-range-in-the-last-datum"),
        pytest.param(DATUMS, LossSpec("no_such_loss"), id="unknown-loss"),
        pytest.param([sft_datum(600)], CROSS_ENTROPY, id="too-long"),
    ],
)
def test_a_failed_call_leaves_no_trace(engine: Engine, datums: list[Datum], loss: LossSpec) -> None:
    train(engine, DATUMS)
    forward_backward(engine, DATUMS[:1])
    before = state_bits(engine.state("a"))

    with pytest.raises(UserError):
        forward_backward(engine, datums, loss=loss)

    assert state_bits(engine.state("a")) == before


def test_one_works_error_does_not_touch_the_others(engine: Engine) -> None:
    engine.create_adapter("b", spec(engine, seed=2))
    alone = repr(forward_backward(engine, DATUMS, adapter="b").outputs)
    engine.clear_gradients("b")

    fine = engine.start(Work("b", DATUMS, CROSS_ENTROPY))
    with pytest.raises(UserError):
        forward_backward(engine, [TOO_HIGH_AN_ID])
    advance_all(engine, [fine])

    assert repr(engine.finish(fine).outputs) == alone
    assert any(gradient.any() for gradient in gradients(engine, "b").values())


def test_a_step_after_a_failed_call_uses_the_earlier_successful_calls(engine: Engine) -> None:
    engine.load_state("b", engine.state("a"), with_optimizer=True)
    for adapter in ("a", "b"):
        forward_backward(engine, DATUMS, adapter=adapter)
    with pytest.raises(UserError):
        forward_backward(engine, [TOO_HIGH_AN_ID], adapter="b")

    for adapter in ("a", "b"):
        engine.optim_step(adapter, AdamParams(learning_rate=1e-2))

    assert state_bits(engine.state("a")) == state_bits(engine.state("b"))


def test_importance_sampling_is_the_sum_of_ratio_times_advantage(engine: Engine) -> None:
    datums = [policy_datum(length, seed) for seed, length in enumerate((7, 20))]

    outcome = forward_backward(engine, datums, loss=IMPORTANCE_SAMPLING)

    by_hand = 0.0
    for output, datum in zip(outcome.outputs, datums, strict=True):
        ratio = np.exp(output["logprobs"].astype(np.float64) - datum.loss_inputs["logprobs"])
        by_hand -= float((ratio * datum.loss_inputs["advantages"]).sum())
    assert outcome.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-4)
