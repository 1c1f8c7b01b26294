"""The rules that decide which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class Scored(Protocol):
    """The step and the metrics of a checkpoint."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping checkpoints. A checkpoint is kept if at least one rule selects the checkpoint.

    The newest checkpoint is always kept.

    `keep_last=None` keeps all checkpoints. `keep_best` is the number of checkpoints to keep with the smallest `metric`
    (`mode="min"`) or the largest `metric`. Of equal checkpoints, the newer checkpoint counts as better. A checkpoint
    that lacks the metric, or has NaN, is never among the best. `keep_every=n` keeps the steps that n divides. Raises
    ValueError for inconsistent rules.
    """

    keep_last: int | None = None
    keep_best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}; it must be 1 or more, or None to keep all")
        if self.keep_best < 0:
            raise ValueError(f"keep_best is {self.keep_best}; it must be 0 or more")
        if (self.keep_best > 0) != (self.metric is not None):
            raise ValueError("keep_best and metric must be set together")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}; it must be 'min' or 'max'")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}; it must be 1 or more, or None")

    def kept(self, checkpoints: Collection[Scored]) -> frozenset[int]:
        """Return the steps that are kept."""
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
