"""The outputs of a call: per datum, in order, and independent of the other datums in the call."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.contract import (
    CROSS_ENTROPY,
    EngineFactory,
    bits,
    compute_together,
    forward_backward,
    gradients,
    spec,
    train,
)
from support.engine.datums import policy_datum, sft_datum, with_inputs
from tinsmith_trainer.engines.base import Datum, Engine, LossSpec, Work

pytestmark = pytest.mark.core

LENGTHS = (5, 20, 5, 60, 12, 20, 1, 33, 5, 5, 5, 5, 5, 5, 5, 5)
DATUMS = [sft_datum(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture
def trained(engine: Engine) -> Engine:
    """Adapters `a` and `b`, equal in shape, different in weights, both some steps from their start."""
    engine.create_adapter("b", spec(engine, seed=2))
    train(engine, DATUMS[:3], steps=2)
    train(engine, DATUMS[3:6], steps=2, adapter="b")
    return engine


def skip_unless_invariant(engine: Engine) -> None:
    if not engine.capabilities().batch_invariant:
        pytest.skip("this engine declares that it is not batch invariant")


def test_outputs_come_in_datum_order_with_the_shape_of_their_targets(trained: Engine, logprob_rounding: float) -> None:
    outputs = forward_backward(trained, DATUMS).outputs

    assert [output["logprobs"].shape for output in outputs] == [(length,) for length in LENGTHS]
    assert all(output["logprobs"].dtype == np.float32 for output in outputs)
    for datum, output in zip(DATUMS, outputs, strict=True):
        alone = forward_backward(trained, [datum]).outputs[0]["logprobs"]
        np.testing.assert_allclose(output["logprobs"], alone, atol=logprob_rounding)


def test_several_targets_together_have_the_results_of_each_target_alone(trained: Engine) -> None:
    datum = sft_datum(9, targets=3)

    logprobs = forward_backward(trained, [datum]).outputs[0]["logprobs"]

    assert logprobs.shape == (9, 3)
    for k in range(3):
        one = with_inputs(datum, target_tokens=datum.loss_inputs["target_tokens"][:, k], weights=np.ones(9, np.float32))
        np.testing.assert_allclose(logprobs[:, k], forward_backward(trained, [one]).outputs[0]["logprobs"], atol=1e-5)


def test_several_weighted_targets_have_the_gradient_of_their_sum(trained: Engine, relative_rounding: float) -> None:
    weights = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    datum = sft_datum(9, targets=3, weights=weights)
    forward_backward(trained, [datum])
    together = gradients(trained)
    trained.clear_gradients("a")

    for k in range(3):
        targets = datum.loss_inputs["target_tokens"][:, k]
        forward_backward(trained, [with_inputs(datum, target_tokens=targets, weights=weights[:, k])])

    for name, gradient in gradients(trained).items():
        atol = relative_rounding * np.abs(together[name]).max()
        np.testing.assert_allclose(gradient, together[name], atol=atol, err_msg=name)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_every_metric_has_exactly_one_reduction_that_the_client_knows(trained: Engine, loss: str) -> None:
    datum = sft_datum(9) if loss == "cross_entropy" else policy_datum(9)
    metrics = forward_backward(trained, [datum], loss=LossSpec(loss)).metrics

    assert "loss:sum" in metrics
    assert {name.partition(":")[2] for name in metrics} <= {"sum", "min", "max"}


def test_outputs_do_not_depend_on_how_a_call_is_split(trained: Engine) -> None:
    skip_unless_invariant(trained)
    whole = bits(forward_backward(trained, DATUMS))

    one_by_one = [forward_backward(trained, [datum]).outputs[0] for datum in DATUMS]
    in_two = [*forward_backward(trained, DATUMS[:5]).outputs, *forward_backward(trained, DATUMS[5:]).outputs]

    assert repr([output["logprobs"].tolist() for output in one_by_one]) == whole
    assert repr([output["logprobs"].tolist() for output in in_two]) == whole


def test_outputs_do_not_depend_on_the_order_of_datums(trained: Engine) -> None:
    skip_unless_invariant(trained)
    forwards = forward_backward(trained, DATUMS).outputs
    backwards = forward_backward(trained, DATUMS[::-1]).outputs
    assert repr(list(forwards)) == repr(list(backwards[::-1]))


@pytest.mark.parametrize("company", [DATUMS, DATUMS[:1], DATUMS[::-1]], ids=["equal", "one-datum", "reversed"])
@pytest.mark.core("durability 7", "Engine.cobatch", "Engine.advance")
def test_company_of_another_model_changes_no_bit(trained: Engine, company: list[Datum]) -> None:
    skip_unless_invariant(trained)
    alone = forward_backward(trained, DATUMS)
    alone_gradients = gradients(trained)
    trained.clear_gradients("a")

    _, outcome = compute_together(trained, [Work("b", company, CROSS_ENTROPY), Work("a", DATUMS, CROSS_ENTROPY)])

    assert bits(outcome) == bits(alone)
    assert repr(outcome.metrics) == repr(alone.metrics)
    for name, gradient in gradients(trained).items():
        assert np.array_equal(gradient, alone_gradients[name]), name


@pytest.mark.core("durability 7")
def test_a_second_engine_with_the_same_inputs_has_the_same_bits(engine_factory: EngineFactory) -> None:
    states = []
    for _ in range(2):
        engine = engine_factory()
        engine.create_adapter("a", spec(engine))
        train(engine, DATUMS, steps=2)
        states.append(engine.state("a"))
    assert all(np.array_equal(states[0].tensors[name], values) for name, values in states[1].tensors.items())


@pytest.mark.core("Engine.cobatch_room")
def test_calls_share_a_forward_where_there_is_room_and_only_there(trained: Engine) -> None:
    first, fits = (trained.start(Work(adapter, DATUMS[:1], CROSS_ENTROPY)) for adapter in "ab")

    shared = [first, fits] if fits.next_tokens <= trained.cobatch_room(first) else [first]

    assert list(trained.cobatch([first, fits])) == shared
