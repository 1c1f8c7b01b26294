"""The order of one model's operations: which operation runs next, and which numbers will not arrive.

The functions are pure.

Clients number a model's operations 1, 2, 3…; `positions` says where plain calls are among these. Of the chunks of one
forward_backward, the first chunk arrives last, and some numbers never arrive. The rules for the order of operations:

- an operation runs when each operation with a lower number has run, or is known not to arrive;
- a client sends another numbered operation than a forward_backward only after all lower operations have ended, so its
  arrival closes all lower gaps;
- a plain call closes no gap, and is never missing itself;
- a gap below a forward_backward stays open until the time limit for gaps is over or the session ends.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tinsmith_trainer.errors import Failure
from tinsmith_trainer.oplog.positions import PlainPositions


@dataclass(frozen=True, slots=True)
class Turn:
    """The position of the next operation, and `missing`: the clients' numbers before it that never arrived."""

    seq_id: int
    missing: range


class OperationOrder:
    """The order in which accepted operations run.

    Operations are known by their positions. `applied` is the last position that ran or was skipped, and -1 before the
    model is created. What is missing below `closed_below` will not run.
    """

    def __init__(self, applied: int = -1, closed_below: int = 0, plain: PlainPositions | None = None) -> None:
        self.applied = applied
        self.closed_below = closed_below
        self.plain = PlainPositions() if plain is None else plain
        self._waiting: list[int] = []

    def accept(self, seq_id: int, *, is_forward_backward: bool) -> None:
        """Add an operation that has not run and is not late."""
        heapq.heappush(self._waiting, seq_id)
        if not is_forward_backward and seq_id not in self.plain:
            self.close_below(seq_id)

    def is_late(self, seq_id: int) -> bool:
        """Return whether the position of a new operation was already skipped."""
        return seq_id <= self.applied or seq_id < self.closed_below

    def close_below(self, seq_id: int) -> None:
        self.closed_below = max(self.closed_below, seq_id)

    def open_gap(self) -> int | None:
        """Return the position of an operation that waits for a missing number, or None."""
        if not self._waiting or self.next_turn() is not None:
            return None
        return self._waiting[0]

    def next_turn(self) -> Turn | None:
        """Return the operation that runs now, without removing the operation from the order.

        Return None if no operation waits, or if a gap is open.
        """
        if not self._waiting:
            return None
        lowest, missing = self._waiting[0], self.missing()
        if missing and self.closed_below < lowest:
            return None
        return Turn(lowest, missing)

    def missing(self) -> range:
        """Return the clients' numbers that are missing before the first operation that waits."""
        if not self._waiting:
            return range(0)
        last = self.plain.numbered_up_to(self._waiting[0] - 1)
        return range(self.plain.numbered_up_to(self.applied) + 1, last + 1)

    def finish(self, turn: Turn) -> None:
        """Note that the turn's operation ran or failed."""
        if not self._waiting or self._waiting[0] != turn.seq_id:
            raise AssertionError(f"operation {turn.seq_id} finished out of turn")
        heapq.heappop(self._waiting)
        self.applied = turn.seq_id

    def waiting(self) -> tuple[int, ...]:
        """Return the numbers of waiting operations, in any order."""
        return tuple(self._waiting)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)


def missing_failure(missing: range) -> Failure:
    """Return the failure of the operations that depend on missing numbers.

    Each missing operation may have been a gradient, so training without this operation would be wrong.
    """
    which = f"operation {missing[0]}" if len(missing) == 1 else f"operations {missing[0]} to {missing[-1]}"
    return Failure("user", f"{which} of this model never arrived")


def failed_step_message(failure: Failure) -> str:
    return (
        "optim_step was not applied, because the gradient since the last step is incomplete: "
        f"{failure.message.rstrip('.?!')}. Its gradients were dropped; weights, moments and step are unchanged. "
        "Fix the cause, then send forward_backward and optim_step again."
    )


MOST_RANGES = 1000
"""The maximum number of ranges. Clients count 1, 2, 3…, and each lost operation leaves a gap.

If a client leaves more gaps, the oldest missing numbers count as used.
"""


class NumberRanges:
    """A set of numbers that only grows, stored as ranges.

    A million consecutive numbers take as much memory as one number.

    If the set has more than `most` ranges, the lowest gap counts as filled.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), most: int = MOST_RANGES) -> None:
        """Create the set. Each item of `ranges` is a first and a last number.

        The items are in ascending order, with gaps between two items.
        """
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
