"""Calls of backends that do not divide a Work: one microbatch contains the whole Work.

Backends of this kind write gradients to the accumulator during the computation. So the computation happens in `finish`,
and a call that is dropped earlier has no effect.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from typing_extensions import override

from tinsmith_trainer.engines.base import Call, CallRunner, Outcome, Work

Prepared = TypeVar("Prepared")


@dataclass(slots=True, eq=False)
class UndividedCall(Call, Generic[Prepared]):
    """A call that `finish` computes as a whole. `ready`: `advance` was called."""

    work: Work
    prepared: Prepared
    ready: bool = False

    @property
    @override
    def next_tokens(self) -> int:
        return 0 if self.ready else max(1, sum(datum.length for datum in self.work.datums))


class UndividedCallRunner(CallRunner, Generic[Prepared]):
    """A base class for backends that check a Work in `prepare`, and add its gradients to the accumulator in `compute`.

    The methods `prepare` and `compute` can raise TrainerError.
    """

    @abstractmethod
    def prepare(self, work: Work) -> Prepared:
        """Check the work, and refuse work that cannot be computed."""

    @abstractmethod
    def compute(self, work: Work, prepared: Prepared) -> Outcome: ...

    @override
    def start(self, work: Work) -> Call:
        return UndividedCall(work, self.prepare(work))

    @override
    def cobatch_room(self, call: Call) -> int:
        return 0

    @override
    def cobatch(self, calls: Sequence[Call]) -> Sequence[Call]:
        return calls[:1]

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        for call in calls:
            cast("UndividedCall[Prepared]", call).ready = True

    @override
    def finish(self, call: Call) -> Outcome:
        whole = cast("UndividedCall[Prepared]", call)
        return self.compute(whole.work, whole.prepared)
