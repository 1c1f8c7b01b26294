"""Differences as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tinsmith_trainer.parity.compare import Difference, Quantity
from tinsmith_trainer.parity.plan import Plan


def draw(title: str, plan: Plan, differences: Sequence[Difference], tolerance: float) -> Table:
    """A row per step, the fresh adapter first, with the largest difference of each quantity. 80 columns hold it."""
    table = Table(
        title=title, caption=f"largest differences; more than {tolerance:g} is too much", title_justify="left"
    )
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


def _cell(difference: Difference | None, tolerance: float) -> str:
    if difference is None:
        return ""
    return f"[{'red' if difference.exceeds(tolerance) else 'green'}]{difference.size:.1e}"


def sentence(difference: Difference, tolerance: float) -> str:
    """What is too far apart: which quantity, in which step, by how much, and where."""
    return (
        (
            f"{difference.quantity} differ by {difference.size:.2e} in step {difference.step} "
            f"({difference.where}), more than {tolerance:g}"
        )
        .replace("loss differ ", "loss differs ")
        .replace("norm differ ", "norm differs ")
    )
