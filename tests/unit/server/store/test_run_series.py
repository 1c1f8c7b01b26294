"""A run's series stays bounded, keeps its newest steps whole, and means what it says after it was folded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.store_records import NOW, later
from tinsmith_server.store.records import RunProgress, RunStep
from tinsmith_server.store.run_series import (
    FOLD,
    FOLDED_POINTS,
    FULL_STEPS,
    MOST_FOLDED,
    RECENT_LOSSES,
    SLACK,
    advance,
    fold,
    recent_losses,
    surplus,
)

figures = st.none() | st.floats(-1e6, 1e6)


def a_step(number: int = 1, **fields: object) -> RunStep:
    return replace(RunStep("run", 3 * number, number, later(2.0 * number), tokens=128), **fields)  # type: ignore[arg-type]


@given(st.lists(figures, min_size=FOLD, max_size=FOLD))
def test_a_folded_point_is_the_mean_of_what_is_known_at_the_place_of_its_last_step(losses: list[float | None]) -> None:
    steps = [a_step(number, loss=loss, tokens=number) for number, loss in enumerate(losses, 1)]
    [folded] = fold(steps)
    known = [loss for loss in losses if loss is not None]
    assert (folded.position, folded.step, folded.at, folded.steps) == (30, 10, later(20.0), FOLD)
    assert folded.tokens == round(sum(range(1, 11)) / 10)
    assert folded.loss == (pytest.approx(sum(known) / len(known), abs=1e-6) if known else None)


@given(st.integers(0, 2_000_000))
def test_a_series_is_bounded_however_many_steps_it_has(steps: int) -> None:
    """Rounds of folding leave at most the limits and the slack of the kinds that the steps can fill."""
    points, kind, total = steps, 1, 0
    while True:
        left = points
        while round_ := surplus(left, kind):
            assert round_ % FOLD == 0
            assert round_ <= MOST_FOLDED
            left -= round_
        folded = points - left
        assert left <= (FULL_STEPS if kind == 1 else FOLDED_POINTS) + SLACK
        assert left >= min(points, FULL_STEPS if kind == 1 else FOLDED_POINTS)
        total += left
        points, kind = folded // FOLD, kind * FOLD
        if not points:
            break
    assert total <= FULL_STEPS + SLACK + 3 * (FOLDED_POINTS + SLACK)


def test_rates_are_averages_of_the_time_between_steps() -> None:
    progress = RunProgress("run")
    for number in range(1, 40):
        progress = advance(progress, a_step(number, loss=1.0 / number))
    assert (progress.step, progress.position, progress.at) == (39, 117, later(78.0))
    assert progress.tokens_per_second == pytest.approx(64.0)
    assert progress.seconds_per_step == pytest.approx(2.0)
    assert progress.unfolded == 39


def test_the_first_step_and_two_steps_of_one_moment_have_no_rate() -> None:
    first = advance(RunProgress("run"), a_step(1))
    assert (first.tokens_per_second, first.seconds_per_step) == (None, None)
    assert advance(first, replace(a_step(2), at=first.at or NOW)).tokens_per_second is None


def test_a_pause_of_hours_hardly_changes_the_time_that_a_step_takes() -> None:
    progress = RunProgress("run")
    for number in range(1, 20):
        progress = advance(progress, a_step(number))
    progress = advance(progress, a_step(20, at=later(10 * 3600.0)))
    assert progress.seconds_per_step == pytest.approx(3.8)
    assert progress.step == 20


def test_steps_that_become_slower_are_soon_counted_as_slow() -> None:
    progress = RunProgress("run")
    for number in range(1, 60):
        progress = advance(progress, a_step(number, at=later(2.0 * number if number < 10 else 200.0 * number)))
    assert progress.seconds_per_step == pytest.approx(200.0, rel=0.02)


def test_the_newest_losses_are_kept_and_a_missing_one_has_its_place() -> None:
    progress = RunProgress("run")
    for number in range(1, RECENT_LOSSES + 20):
        progress = advance(progress, a_step(number, loss=None if number % 2 else math.sqrt(number)))
    losses = recent_losses(progress, 3)
    assert losses == [None, pytest.approx(math.sqrt(118)), None]
    assert len(recent_losses(progress, 1000)) == RECENT_LOSSES
    assert recent_losses(progress, 0) == []


@given(st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_every_loss_that_a_worker_can_report_has_its_place(loss: float | None) -> None:
    """A step that the store refuses would block all later events of its worker."""
    [kept] = recent_losses(advance(RunProgress("run"), a_step(loss=loss)), 1)
    largest = 3.4028234663852886e38
    expected = None if loss is None else min(max(loss, -largest), largest)
    assert kept == (None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-44))
