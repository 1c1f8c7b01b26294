"""Calls that are under way at once: each computes as if it were alone, whatever runs between their microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.contract import (
    CROSS_ENTROPY,
    advance_all,
    bits,
    compute_together,
    forward_backward,
    gradients,
    spec,
    state_bits,
    train,
)
from support.engine.datums import sft_datum, with_inputs
from tinsmith_trainer.engines.base import Call, Engine, Outcome, Work

pytestmark = pytest.mark.core

LENGTHS = (5, 20, 5, 60, 12, 20, 1, 33, *[5] * 8)
DATUMS = [sft_datum(length, seed) for seed, length in enumerate(LENGTHS)]
WORKS = [
    Work("a", DATUMS, CROSS_ENTROPY),
    Work("b", DATUMS[::-1], CROSS_ENTROPY),
    Work("b", DATUMS[:4], CROSS_ENTROPY, forward_only=True),
    Work("a", DATUMS[5:], CROSS_ENTROPY),
]


@pytest.fixture
def trained(engine: Engine) -> Engine:
    """Adapters `a` and `b`, of different rank, both some steps from their start."""
    engine.create_adapter("b", spec(engine, rank=2, seed=2))
    train(engine, DATUMS[:3], steps=2)
    train(engine, DATUMS[3:6], steps=2, adapter="b")
    return engine


def what_is_left(engine: Engine, outcomes: Sequence[Outcome]) -> dict[str, NDArray[np.float32]]:
    """Return all values that a client can see afterwards, and empty the accumulators."""
    seen = {}
    for number, outcome in enumerate(outcomes):
        for datum, output in enumerate(outcome.outputs):
            seen |= {f"call {number}, datum {datum}, {name}": values for name, values in output.items()}
        seen |= {f"call {number}, {name}": np.float32(value) for name, value in outcome.metrics.items()}
    for adapter in "ab":
        seen |= {f"{adapter}/{name}": values for name, values in engine.state(adapter).tensors.items()}
        engine.clear_gradients(adapter)
    return seen


def one_after_the_other(engine: Engine) -> dict[str, NDArray[np.float32]]:
    return what_is_left(engine, [compute_together(engine, [work])[0] for work in WORKS])


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_order_of_microbatches_changes_a_bit_of_exact_numerics_or_more_than_rounding_of_fast_ones(
    trained: Engine, cobatch_rounding: float, data: st.DataObject
) -> None:
    alone = one_after_the_other(trained)
    calls = [trained.start(work) for work in WORKS]
    while pending := [call for call in calls if call.next_tokens]:
        trained.advance(trained.cobatch(data.draw(st.permutations(pending))[: data.draw(st.integers(1, 4))]))
    found = what_is_left(trained, [trained.finish(call) for call in calls])
    assert found.keys() == alone.keys()
    for name, values in found.items():
        atol = cobatch_rounding * max(1.0, float(np.abs(alone[name]).max()))
        np.testing.assert_allclose(values, alone[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy reports the overflow
def test_an_overflow_of_one_call_does_not_reach_the_calls_of_its_forward(
    trained: Engine, cobatch_rounding: float
) -> None:
    forward_backward(trained, DATUMS[:2])
    expected = gradients(trained)
    trained.clear_gradients("a")
    overflowing = with_inputs(sft_datum(20), weights=[3e38] * 20)
    compute_together(trained, [Work("b", [overflowing], CROSS_ENTROPY), Work("a", DATUMS[:2], CROSS_ENTROPY)])
    assert not all(np.isfinite(gradient).all() for gradient in gradients(trained, "b").values())
    for name, gradient in gradients(trained).items():
        atol = cobatch_rounding * float(np.abs(expected[name]).max())
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.core("Engine.capabilities")
def test_an_engine_gives_way_within_a_call_unless_it_says_that_it_does_not(trained: Engine) -> None:
    call = trained.start(WORKS[0])
    microbatches = 0
    while call.next_tokens:
        trained.advance(trained.cobatch([call]))
        microbatches += 1
    assert (microbatches > 1) == trained.capabilities().divides_calls


def test_a_call_that_is_dropped_leaves_no_trace(trained: Engine) -> None:
    forward_backward(trained, DATUMS[:2])
    before = state_bits(trained.state("a"))
    for computed in (0, 1, 10**6):
        call = trained.start(WORKS[0])
        advance(trained, call, computed)
        del call
        assert state_bits(trained.state("a")) == before
    expected = bits(forward_backward(trained, DATUMS[2:]))
    trained.load_state("a", trained.state("a"), with_optimizer=True)
    assert bits(forward_backward(trained, DATUMS[2:])) == expected


def test_a_state_that_is_read_within_a_call_is_that_before_it(trained: Engine) -> None:
    before = state_bits(trained.state("a"))
    call = trained.start(WORKS[0])
    advance(trained, call, 1)
    assert state_bits(trained.state("a")) == before
    advance_all(trained, [call])
    trained.finish(call)
    assert any(gradient.any() for gradient in gradients(trained).values())


def test_another_adapter_may_step_come_and_go_within_a_call(trained: Engine) -> None:
    alone, gradient_alone = bits(forward_backward(trained, DATUMS)), gradients(trained)
    trained.clear_gradients("a")
    call = trained.start(WORKS[0])
    advance(trained, call, 1)
    train(trained, DATUMS[:2], adapter="b")
    trained.drop("b")
    trained.create_adapter("c", spec(trained, seed=3))
    advance_all(trained, [call])
    assert bits(trained.finish(call)) == alone
    assert all((gradient == gradient_alone[name]).all() for name, gradient in gradients(trained).items())


def advance(engine: Engine, call: Call, microbatches: int) -> None:
    for _ in range(microbatches):
        if not call.next_tokens:
            return
        engine.advance(engine.cobatch([call]))
