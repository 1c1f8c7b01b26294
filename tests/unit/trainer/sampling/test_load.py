"""The load that a sampler reports to autoscalers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.load import WINDOW_SECONDS, SamplerLoad


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_oldest_sample_is_the_oldest_that_has_not_ended() -> None:
    clock = Clock()
    load = SamplerLoad(clock)
    assert load.oldest_seconds() == 0.0
    for name in ("first", "second"):
        load.took(name)
        clock.now += 10
    assert load.oldest_seconds() == 20
    load.ended("first")
    assert load.oldest_seconds() == 10
    load.ended("second")
    assert load.oldest_seconds() == 0.0


@given(st.lists(st.floats(0.5, 40.0), min_size=1, max_size=40), st.integers(1, 1000))
def test_a_steady_speed_is_reported_however_often_it_is_asked_for(pauses: list[float], speed: int) -> None:
    clock = Clock()
    load, started = SamplerLoad(clock), clock.now
    for pause in pauses:
        clock.now += pause
        drawn = int((clock.now - started) * speed)
        # Tokens are whole, so the speed is exact but for one token.
        assert load.tokens_per_second(drawn) == pytest.approx(speed, abs=1 / min(pause, WINDOW_SECONDS) + 1e-6)


def test_a_sampler_that_stops_has_no_speed_after_two_windows_at_most() -> None:
    clock = Clock()
    load = SamplerLoad(clock)
    clock.now += 10
    assert load.tokens_per_second(1000) == 100
    seen = []
    while clock.now < 1010 + 2 * WINDOW_SECONDS:
        clock.now += 5
        seen.append(load.tokens_per_second(1000))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0.0


def test_two_questions_in_one_moment_have_the_same_answer() -> None:
    clock = Clock()
    load = SamplerLoad(clock)
    assert load.tokens_per_second(0) == 0.0
    clock.now += 4
    assert load.tokens_per_second(8) == load.tokens_per_second(8) == 2.0
