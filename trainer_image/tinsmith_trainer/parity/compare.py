"""The differences between two runs of one plan, as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from tinsmith_trainer.parity.plan import ParityPlan

Arrays = Mapping[str, NDArray[np.float32]] | Mapping[str, NDArray[np.float64]]


class Quantity(StrEnum):
    """A compared quantity.

    Logprobs and weights are compared by the difference, and the other two quantities by the relative difference.

    In a relative difference, a size below 1 counts as 1, so that one tolerance fits all quantities.
    """

    LOGPROBS = "logprobs"
    LOSS = "loss"
    GRADIENT_NORM = "gradient norm"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The results of one engine after a step. The record of step 0 is for the new adapter, and has only weights.

    `logprobs` are by call and datum, `losses` by call, `weights` by name.
    """

    weights: Mapping[str, NDArray[np.float32]]
    logprobs: Mapping[str, NDArray[np.float32]]
    losses: Mapping[str, float]
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of a quantity in a step, and the place where it occurs.

    The difference is infinite if one engine lacks a value.
    """

    step: int
    quantity: Quantity
    size: float
    where: str

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the difference exceeds the tolerance. A difference of NaN always exceeds the tolerance."""
        return not self.size <= tolerance


def compare(first: Sequence[StepRecord], second: Sequence[StepRecord]) -> list[Difference]:
    """Return the differences of each step, in the order of Quantity. Missing quantities are left out."""
    return [
        difference
        for step, (one, other) in enumerate(zip(first, second, strict=True))
        for difference in _compare_step(step, one, other)
    ]


def first_beyond(differences: Sequence[Difference], tolerance: float) -> list[Difference]:
    """Return the first step in which each quantity exceeds the tolerance, in the order of steps."""
    found: dict[Quantity, Difference] = {}
    for difference in differences:
        if difference.exceeds(tolerance):
            found.setdefault(difference.quantity, difference)
    return list(found.values())


def render_table(title: str, plan: ParityPlan, differences: Sequence[Difference], tolerance: float) -> Table:
    """Return a table of 80 columns with the largest differences.

    The table has a row for the new adapter, then a row for each step.
    """
    table = Table(title=title, caption=f"largest differences; the tolerance is {tolerance:g}", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("losses")
    for quantity in Quantity:
        table.add_column(quantity, justify="right", no_wrap=True)
    found = {(difference.step, difference.quantity): difference for difference in differences}
    for step in range(len(plan.steps) + 1):
        losses = "\n".join(call.loss.name for call in plan.steps[step - 1].calls) if step else "before the first"
        cells = [_cell(found.get((step, quantity)), tolerance) for quantity in Quantity]
        table.add_row(str(step), losses, *cells)
    return table


def describe(difference: Difference, tolerance: float) -> str:
    """Describe a difference that exceeds the tolerance: the quantity, the step, the size and the place."""
    return (
        (
            f"{difference.quantity} differ by {difference.size:.2e} in step {difference.step} "
            f"({difference.where}), more than {tolerance:g}"
        )
        .replace("loss differ ", "loss differs ")
        .replace("norm differ ", "norm differs ")
    )


def _compare_step(step: int, one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    if one.logprobs or other.logprobs:
        yield _largest(step, Quantity.LOGPROBS, one.logprobs, other.logprobs)
    if one.losses or other.losses:
        yield _largest(step, Quantity.LOSS, _as_arrays(one.losses), _as_arrays(other.losses), relative=True)
    if one.gradient_norm is not None and other.gradient_norm is not None:
        norms = [{"of all weights": record.gradient_norm or 0.0} for record in (one, other)]
        yield _largest(step, Quantity.GRADIENT_NORM, _as_arrays(norms[0]), _as_arrays(norms[1]), relative=True)
    yield _largest(step, Quantity.WEIGHTS, one.weights, other.weights)


def _as_arrays(numbers: Mapping[str, float]) -> dict[str, NDArray[np.float64]]:
    return {name: np.array([value]) for name, value in numbers.items()}


def _largest(step: int, quantity: Quantity, one: Arrays, other: Arrays, *, relative: bool = False) -> Difference:
    sizes = {name: _apart(one.get(name), other.get(name), relative=relative) for name in sorted({*one, *other})}
    where = max(sizes, key=lambda name: math.inf if math.isnan(sizes[name]) else sizes[name])
    return Difference(step, quantity, sizes[where], where)


def _apart(
    one: NDArray[np.float32] | NDArray[np.float64] | None,
    other: NDArray[np.float32] | NDArray[np.float64] | None,
    *,
    relative: bool,
) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    with np.errstate(invalid="ignore"):  # infinities give NaN, which exceeds every tolerance
        distance = np.abs(one.astype(np.float64) - other)
        if relative:
            distance = distance / np.maximum(1.0, np.abs(one))
    return float(distance.max(initial=0.0))


def _cell(difference: Difference | None, tolerance: float) -> Text:
    if difference is None:
        return Text()
    return Text(f"{difference.size:.1e}", style="red" if difference.exceeds(tolerance) else "green")
