"""What a call answers, from what was computed for each of its datums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import Outcome, Work
from tinsmith_trainer.losses import PreparedLoss

_Reduction = Callable[[Sequence[float]], float]
_REDUCTIONS: Mapping[str, _Reduction] = {"sum": sum, "min": min, "max": max}


@dataclass(frozen=True, slots=True)
class DatumResult:
    """Logprobs float32 of the shape of the datum's targets, its loss, and the loss's metrics by `name:reduction`."""

    logprobs: NDArray[np.float32]
    loss: float
    metrics: Mapping[str, float]


def outcome_of(work: Work, loss: PreparedLoss, results: Sequence[DatumResult]) -> Outcome:
    """Reduces over the datums, in their order."""
    metrics = {"loss:sum": sum(result.loss for result in results)}
    for name in results[0].metrics:
        metrics[name] = _REDUCTIONS[name.partition(":")[2]]([result.metrics[name] for result in results])
    return Outcome(
        outputs=[{"logprobs": result.logprobs} for result in results],
        metrics=metrics | loss.standing_metrics(),
        trained_tokens=0 if work.forward_only else sum(datum.length for datum in work.datums),
    )
