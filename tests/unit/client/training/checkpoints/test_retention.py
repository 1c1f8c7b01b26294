"""The checkpoints that are kept, for any order of saves and any metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith.training import Retention


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    metrics: Mapping[str, float]


SCORES = st.none() | st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]) | st.floats(-10, 10)


def saved_at(step: int, score: float | None) -> Saved:
    return Saved(step, {} if score is None else {"loss": score})


RUNS = st.dictionaries(st.integers(0, 60), SCORES, max_size=15).map(
    lambda scores: [saved_at(step, score) for step, score in scores.items()]
)


@st.composite
def retentions(draw: st.DrawFn) -> Retention:
    keep_best = draw(st.integers(0, 4))
    return Retention(
        keep_last=draw(st.integers(1, 5)),
        keep_best=keep_best,
        metric="loss" if keep_best else None,
        mode=draw(st.sampled_from(["min", "max"])),
        keep_every=draw(st.none() | st.integers(1, 10)),
    )


def is_better(one: Saved, other: Saved, mode: Literal["min", "max"]) -> bool:
    mine, others = one.metrics.get("loss", math.nan), other.metrics.get("loss", math.nan)
    if math.isnan(mine) or math.isnan(others):
        return not math.isnan(mine)
    if mine == others:
        return one.step > other.step
    return mine < others if mode == "min" else mine > others


def is_among_the_best(one: Saved, run: Sequence[Saved], retention: Retention) -> bool:
    if math.isnan(one.metrics.get("loss", math.nan)):
        return False
    return sum(is_better(other, one, retention.mode) for other in run if other is not one) < retention.keep_best


@given(RUNS, retentions())
def test_a_checkpoint_stays_exactly_if_a_rule_keeps_it(run: list[Saved], retention: Retention) -> None:
    assert retention.keep_last is not None
    for one in run:
        newer = sum(other.step > one.step for other in run)
        wanted = (
            newer < retention.keep_last
            or (retention.keep_every is not None and one.step % retention.keep_every == 0)
            or is_among_the_best(one, run, retention)
        )
        assert (one.step in retention.kept(run)) == wanted


@given(RUNS, retentions())
def test_the_newest_stays_and_a_second_pruning_removes_nothing(run: list[Saved], retention: Retention) -> None:
    kept = retention.kept(run)
    assert kept >= {max((one.step for one in run), default=-1)} - {-1}
    assert retention.kept([one for one in run if one.step in kept]) == kept


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"keep_last": 0}, "it must be 1 or more"),
        ({"keep_best": -1, "metric": "loss"}, "keep_best is -1"),
        ({"keep_best": 1}, "must be set together"),
        ({"metric": "loss"}, "must be set together"),
        ({"mode": "lowest"}, "'min' or 'max'"),
        ({"keep_every": 0}, "it must be 1 or more"),
    ],
    ids=str,
)
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Retention(**rules)
