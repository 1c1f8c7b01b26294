"""A forward is shared where that was measured to be faster, and both ways are tried again once in a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.training.co_batching import MEASURED_FORWARDS, TRIED_AGAIN_AFTER_FORWARDS, ForwardTimes

SECONDS = st.floats(1e-6, 10.0)


def run(measured: ForwardTimes, forwards: int, alone: float, shared: float) -> list[bool]:
    """Return, for each of this many forwards, whether it was shared."""
    decided = []
    for _ in range(forwards):
        decided.append(measured.sharing_pays())
        measured.note(shared if decided[-1] else alone, shared=decided[-1])
    return decided


def test_both_ways_are_measured_before_one_is_chosen() -> None:
    decided = run(ForwardTimes(), 2 * MEASURED_FORWARDS, alone=1.0, shared=1.0)
    assert decided.count(True) == decided.count(False) == MEASURED_FORWARDS


@given(SECONDS, SECONDS)
def test_the_faster_way_is_taken_and_the_other_is_tried_once_in_a_while(alone: float, shared: float) -> None:
    measured = ForwardTimes()
    run(measured, 2 * MEASURED_FORWARDS, alone, shared)
    decided = run(measured, 10 * TRIED_AGAIN_AFTER_FORWARDS, alone, shared)
    assert decided.count(shared > alone) == 10


def test_a_way_that_has_become_faster_is_found_again() -> None:
    measured = ForwardTimes()
    run(measured, 100, alone=1.0, shared=2.0)
    decided = run(measured, MEASURED_FORWARDS * TRIED_AGAIN_AFTER_FORWARDS, alone=1.0, shared=0.5)
    assert all(decided[-TRIED_AGAIN_AFTER_FORWARDS // 2 :])


def test_one_odd_measurement_decides_nothing() -> None:
    measured = ForwardTimes()
    run(measured, 100, alone=1.0, shared=0.5)
    measured.note(1000.0, shared=True)
    assert measured.sharing_pays()
