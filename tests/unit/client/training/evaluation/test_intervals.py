"""Intervals have the values of published tables, and contain the truth as often as they claim."""

from __future__ import annotations

import random

import pytest
from tinsmith.training.evaluation.intervals import (
    EXACT_DEGREES,
    Estimate,
    estimate,
    paired_difference,
    t_quantile,
    wilson,
)

T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}
"""Student's t for 95 % between both tails, from published tables."""
WILSON = {(5, 10): (0.2366, 0.7634), (0, 10): (0.0, 0.2775), (10, 10): (0.7225, 1.0), (1, 1): (0.2065, 1.0)}


@pytest.mark.parametrize("degrees", T_TABLE)
def test_t_is_that_of_the_tables(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(T_TABLE[degrees], abs=5e-4)


@pytest.mark.parametrize(("successes", "examples"), WILSON)
def test_zeros_and_ones_have_wilsons_interval(successes: int, examples: int) -> None:
    found = estimate([1.0] * successes + [0.0] * (examples - successes))
    assert (found.low, found.high) == pytest.approx(WILSON[successes, examples], abs=5e-5)
    assert found == wilson(successes, examples)
    assert found.low <= found.mean <= found.high


def test_the_difference_of_pairs_is_tighter_than_either_mean() -> None:
    """R's paired test of the same data gives 0.7001142 to 2.4598858."""
    first = dict(enumerate([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]))
    second = dict(enumerate([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]))
    named = [{str(patient): hours for patient, hours in drug.items()} for drug in (first, second)]
    found = paired_difference(*named)
    assert (found.mean, found.low, found.high) == pytest.approx((1.58, 0.7001142, 2.4598858), abs=1e-6)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_wilsons_interval_holds_the_truth_as_often_as_it_says(share: float) -> None:
    """The normal interval is 36 % off at 0.05 with 20 examples, where it is often a point."""
    drawn = random.Random(1)
    found = [wilson(sum(drawn.random() < share for _ in range(20)), 20) for _ in range(4000)]
    held = sum(holds(one, share) for one in found) / len(found)
    assert 0.91 < held < 0.985


def holds(found: Estimate, truth: float) -> bool:
    return found.low <= truth <= found.high


def test_t_has_no_step_at_the_start_of_its_expansion() -> None:
    below, above = t_quantile(EXACT_DEGREES), t_quantile(EXACT_DEGREES + 1)
    assert 0 < below - above < 1e-5
    assert t_quantile(10**9) == pytest.approx(1.959964, abs=1e-6)


def test_only_common_examples_are_pairs_and_an_empty_comparison_is_refused() -> None:
    assert paired_difference({"a": 1.0, "b": 0.0}, {"b": 1.0, "c": 0.0}).examples == 1
    with pytest.raises(ValueError, match="no example in common"):
        paired_difference({"a": 1.0}, {"b": 1.0})
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])
