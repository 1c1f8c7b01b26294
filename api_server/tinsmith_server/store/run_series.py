"""The rules of a run's series: its progress, and the points that stand for several steps."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

from tinsmith_server.store.records import RunProgress, RunStep

FOLD = 10
"""The number of points that become one point."""
FULL_STEPS = 10_000
"""The newest points that keep one step each."""
FOLDED_POINTS = 2_000
"""The points of each coarser kind that are kept before they are folded again."""
SLACK = 1_000
"""The points above a limit before a round of folding, so that a round has some work."""
MOST_FOLDED = 10_000
"""The points that a round folds at most. Other writes wait for a round, 0.7 s for this number on SQLite."""
RECENT_LOSSES = 100
LARGEST_FLOAT32 = 3.4028234663852886e38
# The weight of the newest interval in the moving averages.
NEWEST_WEIGHT = 0.1
# A program that was stopped, and resumed hours later, does not take hours for each step.
LONGEST_STEP = 10.0
"""The longest step that counts, in averages of the earlier ones."""


def advance(progress: RunProgress, step: RunStep) -> RunProgress:
    """Return the progress after a step."""
    elapsed = (step.at - progress.at).total_seconds() if progress.at is not None else 0.0
    rates = (progress.tokens_per_second, progress.seconds_per_step)
    if elapsed > 0:
        longest = elapsed if rates[1] is None else LONGEST_STEP * rates[1]
        rates = (_averaged(rates[0], step.tokens / elapsed), _averaged(rates[1], min(elapsed, longest)))
    return replace(
        progress,
        position=step.position,
        step=step.step,
        at=step.at,
        loss=step.loss,
        tokens_per_second=rates[0],
        seconds_per_step=rates[1],
        recent_losses=(progress.recent_losses + _packed(step.loss))[-4 * RECENT_LOSSES :],
        unfolded=progress.unfolded + 1,
    )


def recent_losses(progress: RunProgress, most: int) -> list[float | None]:
    """Return the newest losses, the newest last."""
    losses = struct.unpack(f"<{len(progress.recent_losses) // 4}f", progress.recent_losses)
    return [None if math.isnan(loss) else loss for loss in losses[max(0, len(losses) - most) :]]


def _packed(loss: float | None) -> bytes:
    # A client chooses the weights of its loss, so the loss may be larger than a float32.
    value = math.nan if loss is None else math.copysign(min(abs(loss), LARGEST_FLOAT32), loss)
    return struct.pack("<f", value)


def surplus(points: int, steps: int) -> int:
    """Return how many of a run's points with this number of steps are to be folded, a multiple of `FOLD`."""
    kept = FULL_STEPS if steps == 1 else FOLDED_POINTS
    return min((points - kept) // FOLD * FOLD, MOST_FOLDED) if points > kept + SLACK else 0


def fold(points: Sequence[RunStep]) -> list[RunStep]:
    """Return one point for each `FOLD` points, which are in order and have equally many steps."""
    return [_folded(points[first : first + FOLD]) for first in range(0, len(points), FOLD)]


def _folded(points: Sequence[RunStep]) -> RunStep:
    return replace(
        points[-1],
        steps=sum(point.steps for point in points),
        tokens=round(sum(point.tokens for point in points) / len(points)),
        loss=_mean([point.loss for point in points]),
        grad_norm=_mean([point.grad_norm for point in points]),
        learning_rate=_mean([point.learning_rate for point in points]),
        seconds=_mean([point.seconds for point in points]),
        sampler_gap=_mean([point.sampler_gap for point in points]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(value / len(known) for value in known) if known else None


def _averaged(average: float | None, newest: float) -> float:
    return newest if average is None else average + NEWEST_WEIGHT * (newest - average)
