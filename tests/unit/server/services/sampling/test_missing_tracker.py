"""A brief absence is not a permanent one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tinsmith_server.services.sampling.sampling import MissingTracker

LENGTH = timedelta(seconds=300)


class Clock:
    """A clock that advances when the test says so."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def go_on(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def missed(tracker: MissingTracker[str], clock: Clock, seconds: int) -> bool:
    """Return whether the deadline has passed after this many seconds of repeated misses."""
    for _ in range(seconds // 10):
        tracker.is_over("a")
        clock.go_on(10)
    return tracker.is_over("a")


@pytest.mark.parametrize(("seconds", "over"), [(0, False), (300, False), (310, True)])
def test_it_is_over_after_its_length(clock: Clock, seconds: int, over: bool) -> None:
    assert missed(MissingTracker(LENGTH, clock), clock, seconds) is over


def test_the_time_restarts_for_an_entry_that_was_present_meanwhile(clock: Clock) -> None:
    tracker: MissingTracker[str] = MissingTracker(LENGTH, clock)
    assert missed(tracker, clock, 310)
    tracker.note_there("a")
    assert not tracker.is_over("a")


def test_an_item_that_was_not_missed_for_long_may_have_been_there(clock: Clock) -> None:
    tracker: MissingTracker[str] = MissingTracker(LENGTH, clock)
    assert not tracker.is_over("a")
    clock.go_on(301)
    assert not tracker.is_over("a")
