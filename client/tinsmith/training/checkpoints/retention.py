"""Which checkpoints stay: the last ones, the best ones by a metric, and one every so many steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class Scored(Protocol):
    """A step and its metrics by name."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Retention:
    """A checkpoint stays that any of the three rules wants, and the newest one always: a run goes on from it.

    `keep_last=None` keeps all. `keep_best` counts those whose `metric` is the smallest (`mode="min"`) or the largest;
    of equal ones the newer is better. One without that metric, or with NaN for it, is never among the best.
    `keep_every=n` keeps each step that n divides. Raises ValueError for what cannot be meant.
    """

    keep_last: int | None = None
    keep_best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}; the newest checkpoint always stays: 1, or None for all")
        if self.keep_best < 0:
            raise ValueError(f"keep_best is {self.keep_best}; 0 keeps none for its metric")
        if (self.keep_best > 0) != (self.metric is not None):
            raise ValueError("keep_best and metric come together: how many of the best, and by what")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}; it is 'min' or 'max'")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}; it is a number of steps, or None")

    def kept(self, checkpoints: Collection[Scored]) -> frozenset[int]:
        """The steps that stay."""
        by_step = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
        if self.keep_last is None:
            return frozenset(checkpoint.step for checkpoint in by_step)
        last = {checkpoint.step for checkpoint in by_step[-self.keep_last :]}
        return frozenset(last | self._best(by_step) | self._every(by_step))

    def _best(self, by_step: Sequence[Scored]) -> set[int]:
        if self.metric is None:
            return set()
        sign = 1 if self.mode == "min" else -1
        scores = [(sign * checkpoint.metrics.get(self.metric, math.nan), -checkpoint.step) for checkpoint in by_step]
        ranked = sorted(score for score in scores if not math.isnan(score[0]))
        return {-negative_step for _, negative_step in ranked[: self.keep_best]}

    def _every(self, by_step: Sequence[Scored]) -> set[int]:
        return (
            set()
            if self.keep_every is None
            else {checkpoint.step for checkpoint in by_step if checkpoint.step % self.keep_every == 0}
        )
