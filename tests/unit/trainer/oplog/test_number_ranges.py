"""Ranges of numbers answer as a set of them would, in memory that depends on the gaps alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.oplog.ordering import NumberRanges

NUMBERS = st.lists(st.integers(-1, 40))


def ranges_of(numbers: set[int]) -> list[tuple[int, int]]:
    """Return the ranges by definition: each number without a lower neighbour begins one."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    return list(zip(firsts, lasts, strict=True))


def added(numbers: list[int], most: int = 1000) -> NumberRanges:
    ranges = NumberRanges(most=most)
    for number in numbers:
        ranges.add(number)
    return ranges


@given(NUMBERS)
def test_numbers_added_in_any_order_are_in_it_and_no_others(numbers: list[int]) -> None:
    ranges = added(numbers)
    assert {number for number in range(-3, 44) if number in ranges} == set(numbers)
    assert list(ranges) == ranges_of(set(numbers))
    assert bool(ranges) == bool(numbers)


@given(NUMBERS, st.integers(1, 5))
def test_beyond_the_bound_only_gaps_below_are_filled_and_no_number_is_lost(numbers: list[int], most: int) -> None:
    ranges, seen = added(numbers, most), set(numbers)
    assert len(list(ranges)) <= most
    assert all(number in ranges for number in seen)
    filled = {number for number in range(-3, 44) if number in ranges} - seen
    assert all(min(seen) < number < max(seen) for number in filled)
    if len(ranges_of(seen)) <= most and numbers == sorted(numbers):
        assert not filled
