"""Sequence numbers, kept as the ranges that they make: a million in a row take as much memory as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

MOST_RANGES = 1000
"""Programs count 1, 2, 3…, and what is lost on the way leaves a gap here and there. One that leaves more than these
gaps is told of its oldest missing numbers that they were there once, and not that they came too late."""


class NumberRanges:
    """A set that only grows. Once it has more than `most` ranges, its lowest gap counts as filled."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), most: int = MOST_RANGES) -> None:
        """`ranges`: first and last of each, as iterating gives them: ascending, and no two of them touch."""
        self._most = most
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self._firsts.append(first)
            self._lasts.append(last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, number: int) -> bool:
        below = bisect_right(self._firsts, number) - 1
        return below >= 0 and number <= self._lasts[below]

    def add(self, number: int) -> None:
        if number in self:
            return
        above = bisect_right(self._firsts, number)
        extends = above > 0 and self._lasts[above - 1] == number - 1
        precedes = above < len(self._firsts) and self._firsts[above] == number + 1
        if extends and precedes:
            self._fill_gap_below(above)
        elif extends:
            self._lasts[above - 1] = number
        elif precedes:
            self._firsts[above] = number
        else:
            self._firsts.insert(above, number)
            self._lasts.insert(above, number)
            if len(self._firsts) > self._most:
                self._fill_gap_below(1)

    def _fill_gap_below(self, index: int) -> None:
        del self._firsts[index], self._lasts[index - 1]
