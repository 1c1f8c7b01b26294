"""Calls of backends that do not divide a Work: all of it is one microbatch.

Where gradients are in the accumulator as soon as they are computed, only the end of a call may compute them, so that
one that is dropped before leaves no trace.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from typing_extensions import override

from tinsmith_trainer.engines.base import Call, Computer, Outcome, Work

Prepared = TypeVar("Prepared")


@dataclass(slots=True, eq=False)
class WholeCall(Call, Generic[Prepared]):
    work: Work
    prepared: Prepared
    is_due: bool = False

    @property
    @override
    def next_tokens(self) -> int:
        return 0 if self.is_due else max(1, sum(datum.length for datum in self.work.datums))


class ComputesWhole(Computer, Generic[Prepared]):
    """For backends that can `prepare` a Work, and `compute` it into the accumulator. Both raise TrainerError."""

    @abstractmethod
    def prepare(self, work: Work) -> Prepared:
        """Refuses what cannot be computed."""

    @abstractmethod
    def compute(self, work: Work, prepared: Prepared) -> Outcome: ...

    @override
    def start(self, work: Work) -> Call:
        return WholeCall(work, self.prepare(work))

    @override
    def room_beside(self, call: Call) -> int:
        return 0

    @override
    def together(self, calls: Sequence[Call]) -> Sequence[Call]:
        return calls[:1]

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        for call in calls:
            cast("WholeCall[Prepared]", call).is_due = True

    @override
    def finish(self, call: Call) -> Outcome:
        whole = cast("WholeCall[Prepared]", call)
        return self.compute(whole.work, whole.prepared)
