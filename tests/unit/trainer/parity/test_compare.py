from __future__ import annotations

import math

import numpy as np
import pytest
from tinsmith_trainer.parity.compare import Difference, Quantity, StepRecord, compare, first_beyond


def record(
    *, weight: float = 0.5, logprob: float = -1.0, loss: float = 10.0, norm: float = 4.0, name: str = "w"
) -> StepRecord:
    def array(value: float) -> np.ndarray:
        return np.array([0.0, value], np.float32)

    return StepRecord({name: array(weight)}, {"datum 0": array(logprob)}, {"cross_entropy": loss}, norm)


def sizes(one: StepRecord, other: StepRecord) -> dict[Quantity, float]:
    return {difference.quantity: difference.size for difference in compare([one], [other])}


@pytest.mark.parametrize(("one", "other", "size"), [(100.0, 101.0, 0.01), (-100.0, -101.0, 0.01), (0.1, 0.2, 0.1)])
def test_losses_and_norms_differ_by_a_part_of_their_size_or_of_one(one: float, other: float, size: float) -> None:
    found = sizes(record(loss=one, norm=abs(one)), record(loss=other, norm=abs(other)))
    assert found[Quantity.LOSS] == pytest.approx(size)
    assert found[Quantity.GRADIENT_NORM] == pytest.approx(size)


def test_the_largest_difference_of_a_step_is_found_and_where_it_is() -> None:
    one = StepRecord({"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}, {}, {})
    other = StepRecord({"a": np.full(3, 1e-6, np.float32), "b": np.array([0, 0.5], np.float32)}, {}, {})
    assert compare([one], [other]) == [Difference(0, Quantity.WEIGHTS, 0.5, "b")]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(StepRecord({"other": np.zeros(2, np.float32)}, {}, {}), id="another-name"),
        pytest.param(StepRecord({"w": np.zeros(3, np.float32)}, {}, {}), id="another-shape"),
        pytest.param(StepRecord({"w": np.full(2, np.nan, np.float32)}, {}, {}), id="not-a-number"),
        pytest.param(StepRecord({"w": np.full(2, np.inf, np.float32)}, {}, {}), id="infinite"),
        pytest.param(StepRecord({"w": np.zeros(2, np.float32), "more": np.zeros(0, np.float32)}, {}, {}), id="more"),
    ],
)
def test_incomparable_values_exceed_every_tolerance(other: StepRecord) -> None:
    own = StepRecord({"w": np.zeros(2, np.float32)}, {}, {})
    for found in (compare([own], [other]), compare([other], [own])):
        assert [difference.exceeds(1e30) for difference in found] == [True]


def test_a_number_that_is_none_hides_behind_no_larger_difference() -> None:
    one = record(logprob=math.nan)
    (logprobs,) = [d for d in compare([one], [record(logprob=5.0)]) if d.quantity is Quantity.LOGPROBS]
    assert math.isnan(logprobs.size)
    assert logprobs.exceeds(1e30)


def test_a_tolerance_is_a_difference_that_is_still_fine() -> None:
    difference = Difference(1, Quantity.LOSS, 1e-4, "ppo")
    assert not difference.exceeds(1e-4)
    assert difference.exceeds(0.99e-4)


def test_the_first_step_beyond_the_limit_is_reported_for_each_quantity() -> None:
    good, bad, worse = record(), record(weight=0.6, loss=11.0), record(weight=0.9, loss=15.0, logprob=-2.0)
    found = first_beyond(compare([good] * 3, [good, bad, worse]), 1e-3)
    assert [(one.quantity, one.step) for one in found] == [
        (Quantity.LOSS, 1),
        (Quantity.WEIGHTS, 1),
        (Quantity.LOGPROBS, 2),
    ]


def test_runs_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([record()], [record(), record()])
