"""The positions of a model's operations, and the numbers by which clients know these operations.

An SDK numbers a model's calls 1, 2, 3…. A plain call, for example by HTTP without an SDK, has no number. It takes the
position after all operations that have been accepted so far, and later numbers move by one position. So the position of
a numbered call is its number plus the number of plain calls before it. Inside the worker, `seq_id` is the position.

The functions are pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from tinsmith_rpc import PLAIN_SEQ_IDS, RELEASE_SEQ_ID


class PlainPositions:
    """The positions of plain calls, as ranges.

    A thousand plain calls in a row take as much memory as one. If plain calls and numbered calls alternate, each pair
    takes 24 bytes.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Create the set. Each item of `ranges` is a first and a last position, in ascending order, with gaps."""
        self._firsts = array("q")
        self._lasts = array("q")
        # The number of plain calls up to the end of each range.
        self._counts = array("q")
        for first, last in ranges:
            self._append(first, last)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, position: int) -> bool:
        index = bisect_right(self._firsts, position) - 1
        return index >= 0 and position <= self._lasts[index]

    @property
    def last(self) -> int:
        """The highest position of a plain call, or 0."""
        return self._lasts[-1] if self._lasts else 0

    def add(self, position: int) -> None:
        """Add a position above all others."""
        if position <= self.last:
            raise AssertionError(f"plain call {position} does not follow plain call {self.last}")
        if self._lasts and self._lasts[-1] == position - 1:
            self._lasts[-1] = position
            self._counts[-1] += 1
        else:
            self._append(position, position)

    def remove_last(self) -> None:
        if self._firsts[-1] == self._lasts[-1]:
            del self._firsts[-1], self._lasts[-1], self._counts[-1]
        else:
            self._lasts[-1] -= 1
            self._counts[-1] -= 1

    def numbered_up_to(self, position: int) -> int:
        """Return the highest number of a client at or below the position.

        This is the position itself, less the plain calls up to there.
        """
        index = bisect_right(self._firsts, position) - 1
        if index < 0:
            return position
        return position - self._counts[index] + max(self._lasts[index] - position, 0)

    def position_of(self, seq_id: int) -> int:
        """Return the position of the operation that a client knows by this number."""
        if seq_id in (0, RELEASE_SEQ_ID):
            return seq_id
        if seq_id > PLAIN_SEQ_IDS:
            return seq_id - PLAIN_SEQ_IDS
        ranges_before = bisect_left(range(len(self._firsts)), seq_id, key=self._numbered_before)
        return seq_id + (self._counts[ranges_before - 1] if ranges_before else 0)

    def seq_id_of(self, position: int) -> int:
        """Return the number by which clients know the operation at this position."""
        if position == RELEASE_SEQ_ID:
            return position
        return position + PLAIN_SEQ_IDS if position in self else self.numbered_up_to(position)

    def _numbered_before(self, index: int) -> int:
        return self._firsts[index] - 1 - (self._counts[index - 1] if index else 0)

    def _append(self, first: int, last: int) -> None:
        before = self._counts[-1] if self._counts else 0
        self._firsts.append(first)
        self._lasts.append(last)
        self._counts.append(before + last - first + 1)
