"""Calls in progress on ranks: which calls can share forwards, and the data of a group of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from typing_extensions import override

from tinsmith_trainer.engines.base import Call, Datum, Outcome, Work
from tinsmith_trainer.engines.losses import TARGETS, DatumResult, LossArrays, PreparedLoss, outcome_of
from tinsmith_trainer.engines.megatron.step.shared_calls import RankCall, metric_of
from tinsmith_trainer.errors import TrainerError


@dataclass(slots=True, eq=False)
class MegatronCall(Call):
    """A call that the ranks compute as a whole. `finish` adds its gradients, which the ranks hold under `number`."""

    work: Work
    loss: PreparedLoss
    number: int
    outcome: Outcome | None = None
    error: TrainerError | None = None
    runs_alone: bool = False  # since the failure of a shared forward

    @property
    def tokens(self) -> int:
        return max(1, sum(datum.length for datum in self.work.datums))

    @property
    @override
    def next_tokens(self) -> int:
        return self.tokens if self.outcome is None and self.error is None else 0

    @property
    def may_share(self) -> bool:
        """Return whether the call may share forwards. With several targets per token, all rows would have as many."""
        return not self.runs_alone and all(datum.loss_inputs[TARGETS].ndim == 1 for datum in self.work.datums)

    def on_ranks(self, *, packed: bool) -> RankCall:
        return RankCall(
            self.number,
            self.work.adapter_id,
            self.loss.without_arrays(),
            tuple(self.loss.arrays[0]),
            len(self.work.datums),
            self.work.forward_only,
            packed,
        )


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """The limits of a shared forward: the tokens of all calls together, and the number of calls."""

    tokens: int
    calls: int


def select_cobatch(calls: Sequence[MegatronCall], limits: SharingLimits) -> list[MegatronCall]:
    """Return the first call, and the calls that fit together with it into one forward."""
    first = calls[0]
    group, room = [first], limits.tokens - first.tokens
    if not first.may_share:
        return group
    for call in calls[1:]:
        is_alike = call.may_share and call.work.forward_only == first.work.forward_only
        if is_alike and call.tokens <= room and len(group) < limits.calls:
            group.append(call)
            room -= call.tokens
    return group


def datums_of(calls: Sequence[MegatronCall]) -> list[Datum]:
    """Return the datums of all calls, in order."""
    return [datum for call in calls for datum in call.work.datums]


def arrays_of(calls: Sequence[MegatronCall]) -> Sequence[LossArrays]:
    """Return the arrays of all datums. Every datum has the inputs of all losses: zeros where its loss has no such."""
    if len(calls) == 1:
        return calls[0].loss.arrays
    names = sorted({name for call in calls for name in call.loss.arrays[0]})
    return [
        {name: own.get(name, np.zeros(datum.length, np.float32)) for name in names}
        for call in calls
        for datum, own in zip(call.work.datums, call.loss.arrays, strict=True)
    ]


def outcomes_of(calls: Sequence[MegatronCall], results: Sequence[DatumResult]) -> list[Outcome]:
    """Return the outcome of each call from the results of all datums."""
    ends = [0, *accumulate(len(call.work.datums) for call in calls)]
    own = [results[start:end] for start, end in pairwise(ends)]
    if len(calls) > 1:
        own = [[_with_own_metrics(index, result) for result in part] for index, part in enumerate(own)]
    return [outcome_of(call.work, call.loss, part) for call, part in zip(calls, own, strict=True)]


def _with_own_metrics(call: int, result: DatumResult) -> DatumResult:
    prefix = metric_of(call, "")
    own = {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}
    return replace(result, metrics=own)
