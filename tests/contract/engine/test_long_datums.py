"""Calls of datums of 1,000 tokens: repeated, divided, together with another adapter, and by a second engine.

Attention takes such a datum in several blocks, which a GPU may sum in any order. On the CPU in float32 bits are equal,
whatever else is computed there. On a GPU and in bfloat16 docs/how-to/gpu.md promises a bound alone; a GPU also prints
the differences, which tell whether more can be promised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.engine.contract import CROSS_ENTROPY, compute_together, forward_backward, gradients, group, spec
from support.engine.datums import sft_datum
from support.engine.places import Place, peft_engine
from support.tiny_models import LONG, tiny_directory
from tinsmith_trainer.engines.base import AdamParams, Datum, Engine, Outcome, Work
from tinsmith_trainer.engines.peft import PeftEngineSettings

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((1000, 1000, 700))]
SETTINGS = PeftEngineSettings(token_budget=2048)
STEPS = 3
# Without `eps` Adam turns the rounding noise of a gradient near zero into a full step.
ADAM = AdamParams(learning_rate=1e-3, eps=1e-4)

Arrays = Mapping[str, NDArray[np.float32]]
Check = Callable[[str, float, float], None]
"""Takes a name, the measured difference and its bound."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest differences allowed.

    In logprobs, in gradients as a part of the largest element, in weights as a part of how far training moved them.
    """

    logprobs: float
    gradients: float
    weights: float


BITS = Bound(0.0, 0.0, 0.0)
ROUNDED = {torch.float32: Bound(1e-4, 1e-4, 1e-3), torch.bfloat16: Bound(2e-2, 5e-2, 5e-2)}


@dataclass(frozen=True, slots=True)
class Case:
    """An engine, and its bounds: `same` for equal calls, `otherwise` for divided calls and calls in company."""

    place: Place
    dtype: torch.dtype
    same: Bound
    otherwise: Bound

    def engine(self) -> Engine:
        """Return an engine with adapters `a` and `b`, of different rank."""
        engine = peft_engine(self.place, tiny_directory(shape=LONG), SETTINGS, self.dtype)
        engine.create_adapter("a", spec(engine))
        engine.create_adapter("b", spec(engine, rank=2, seed=2))
        return engine


def _case(place: Place, dtype: torch.dtype) -> object:
    """Build a parameter. On a CPU equal calls must have equal bits in either dtype: its kernels are deterministic."""
    rounded = ROUNDED[dtype]
    same = rounded if place == "gpu" else BITS
    case = Case(place, dtype, same, BITS if place == "cpu" else rounded)
    marks = [pytest.mark.gpu] if place == "gpu" else []
    return pytest.param(case, marks=marks, id=f"{place}-{str(dtype).removeprefix('torch.')}")


@pytest.fixture(
    params=[
        _case("cpu", torch.float32),
        *(_case(place, dtype) for place in ("like-gpu", "gpu") for dtype in (torch.float32, torch.bfloat16)),
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def within(request: pytest.FixtureRequest, case: Case, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a check that fails where a difference exceeds its bound, and prints the difference on a GPU."""

    def check(what: str, apart: float, bound: float) -> None:
        if case.place == "gpu":
            with capsys.disabled():
                print(f"\n{request.node.name}: {what} {apart:.1e} apart, {bound:.0e} at most")
        assert apart <= bound, what

    return check


def apart(found: Sequence[Outcome], expected: Outcome) -> float:
    """Return the largest difference of two logprobs."""
    outputs = [output for outcome in found for output in outcome.outputs]
    pairs = zip(outputs, expected.outputs, strict=True)
    return max(float(np.abs(one["logprobs"] - other["logprobs"]).max()) for one, other in pairs)


def apart_by_largest(found: Arrays, expected: Arrays) -> float:
    return max(float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()) for name in expected)


def apart_by_way(found: Arrays, expected: Arrays, start: Arrays) -> float:
    difference, way = (
        np.sqrt(sum(float(np.square(other[name] - one[name]).sum()) for name in one))
        for one, other in ((expected, found), (start, expected))
    )
    return float(difference / way)


def train(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        forward_backward(engine, DATUMS)
        engine.optim_step("a", ADAM)


def test_a_call_once_more_is_the_same(case: Case, within: Check) -> None:
    engine = case.engine()
    train(engine, 1)
    first = forward_backward(engine, DATUMS)
    expected = gradients(engine)
    for _ in range(3):
        engine.clear_gradients("a")
        again = forward_backward(engine, DATUMS)
        within("logprobs", apart([again], first), case.same.logprobs)
        within("gradients", apart_by_largest(gradients(engine), expected), case.same.gradients)


def test_another_engine_takes_the_same_steps(case: Case, within: Check) -> None:
    engine, other = case.engine(), case.engine()
    train(engine, 1)
    other.load_state("a", engine.state("a"), with_optimizer=True)
    start = group(engine.state("a"), "weights")
    for each in (engine, other):
        train(each, STEPS)
    found, expected = (group(each.state("a"), "weights") for each in (other, engine))
    within("weights", apart_by_way(found, expected, start), case.same.weights)


def test_neither_parts_nor_company_change_more_than_the_engine_says(case: Case, within: Check) -> None:
    engine = case.engine()
    train(engine, 1)
    whole = forward_backward(engine, DATUMS)
    expected = gradients(engine)
    within("logprobs of parts", apart([_alone(engine, datum) for datum in DATUMS], whole), case.otherwise.logprobs)
    engine.clear_gradients("a")
    company = [Work("b", DATUMS[1:], CROSS_ENTROPY), Work("a", DATUMS, CROSS_ENTROPY)]
    within("logprobs in company", apart(compute_together(engine, company)[1:], whole), case.otherwise.logprobs)
    within("gradients in company", apart_by_largest(gradients(engine), expected), case.otherwise.gradients)


def _alone(engine: Engine, datum: Datum) -> Outcome:
    return forward_backward(engine, [datum])
