"""Estimates for each checkpoint, task and metric, as CSV and as curves."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.training.evaluation.intervals import Estimate, estimate
from tinsmith.training.evaluation.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = ("checkpoint", "label", "step", "task", "metric", "mean", "low", "high", "examples")


@dataclass(frozen=True, slots=True)
class Summary:
    """The estimate of one metric of one task at one checkpoint. `values` are the values of the examples, by ID.

    Evaluators that are not tasks show no examples. For an evaluator that is not a task, `values` is empty and the
    interval is unknown.
    """

    checkpoint: str
    label: str
    step: int | None
    task: str
    metric: str
    estimate: Estimate
    values: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.task}/{self.metric}"


def summaries_of(rows: Iterable[Row]) -> list[Summary]:
    """Return summaries, ordered by the first appearance of the task and metric, and then by step.

    Base models come first.
    """
    grouped: dict[tuple[str, str, str], dict[str | None, float]] = defaultdict(dict)
    of_checkpoint: dict[str, Row] = {}
    for row in rows:
        of_checkpoint.setdefault(row.checkpoint, row)
        for metric, value in row.scores.items():
            grouped[row.task, metric, row.checkpoint][row.example] = value
    order = {(task, metric): place for place, (task, metric, _) in enumerate(reversed(grouped))}
    summaries = [
        _summary(of_checkpoint[checkpoint], task, metric, values)
        for (task, metric, checkpoint), values in grouped.items()
    ]
    return sorted(summaries, key=lambda summary: (-order[summary.task, summary.metric], _place(summary.step)))


def csv_of(summaries: Iterable[Summary]) -> str:
    """Return the summaries as CSV with a header. The cell of an unknown step or bound is empty."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(COLUMNS)
    for summary in summaries:
        found = summary.estimate
        numbers = (found.mean, found.low, found.high)
        step = "" if summary.step is None else summary.step
        bounds = ["" if math.isnan(number) else repr(number) for number in numbers]
        table.writerow([summary.checkpoint, summary.label, step, summary.task, summary.metric, *bounds, found.examples])
    return written.getvalue()


def by_metric(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Group the summaries by `task/metric`."""
    grouped: dict[str, list[Summary]] = {}
    for summary in summaries:
        grouped.setdefault(summary.name, []).append(summary)
    return grouped


def shown(estimated: Estimate) -> str:
    """Format the mean and the interval for a reader."""
    if math.isnan(estimated.low):
        return f"{estimated.mean:.3g}"
    return f"{estimated.mean:.3g} [{estimated.low:.3g}, {estimated.high:.3g}]"


def _summary(row: Row, task: str, metric: str, values: Mapping[str | None, float]) -> Summary:
    of_examples = {example: value for example, value in values.items() if example is not None}
    found = estimate(list(of_examples.values())) if of_examples else Estimate(values[None], math.nan, math.nan, 0)
    return Summary(row.checkpoint, row.label, row.step, task, metric, found, of_examples)


def _place(step: int | None) -> int:
    return -1 if step is None else step


PANEL_COLUMNS = 2
TINKER = "tinker://"
PANEL_INCHES = (5.0, 3.4)
DOTS_PER_INCH = 120


def draw_curves(runs: Mapping[str, Sequence[Summary]], path: Path) -> None:
    """Draw a panel for each `task/metric`. A panel has a curve and a band of intervals for each run.

    A run's base model is the point at step 0. Several base models, and samplers without a step, are drawn as dashed
    lines. `runs` maps names to runs. The name of a single run may be empty. Raises ValueError if no run has a summary.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    grouped = {run: by_metric(summaries) for run, summaries in runs.items()}
    names = list(dict.fromkeys(name for metrics in grouped.values() for name in metrics))
    if not names:
        raise ValueError("no results to draw")
    columns = min(PANEL_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    # pyplot would need a window system and would keep the figure in memory.
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    for place, name in enumerate(names):
        panel = panels[place // columns][place % columns]
        for number, (run, metrics) in enumerate(grouped.items()):
            _draw_run(panel, run, metrics.get(name, []), f"C{number}")
        _dress(panel, name)
    for unused in range(len(names), rows * columns):
        panels[unused // columns][unused % columns].set_visible(False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_run(panel: Axes, run: str, summaries: Sequence[Summary], colour: str) -> None:
    start = base_model_at_start(summaries)
    stepped = ([start] if start else []) + [point for point in summaries if point.step is not None]
    steps: list[Any] = [point.step or 0 for point in stepped]
    if stepped:
        means = [point.estimate.mean for point in stepped]
        panel.plot(steps, means, color=colour, marker="o", markersize=4, label=run or None)
        lows, highs = [point.estimate.low for point in stepped], [point.estimate.high for point in stepped]
        panel.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
        panel.errorbar(steps, means, yerr=_bars(stepped), fmt="none", ecolor=colour, elinewidth=1, capsize=2)
    if start:
        label = f"{run}: {start.label}" if run else start.label
        hollow: dict[str, Any] = {
            "marker": "o",
            "markersize": 6,
            "markerfacecolor": "white",
            "linestyle": "none",
            "zorder": 3,
        }
        panel.plot([0], [start.estimate.mean], color=colour, label=label, **hollow)
    for number, point in enumerate(summary for summary in summaries if summary.step is None and summary is not start):
        style = ("--", ":", "-.")[number % 3]
        label = f"{run}: {point.label}" if run else point.label
        panel.axhline(point.estimate.mean, color=colour if run else "0.4", linestyle=style, linewidth=1.2, label=label)
        if not math.isnan(point.estimate.low):
            panel.axhspan(
                point.estimate.low, point.estimate.high, color=colour if run else "0.4", alpha=0.07, linewidth=0
            )


def base_model_at_start(summaries: Sequence[Summary]) -> Summary | None:
    """Return the base model from which training started: the only base model, if no checkpoint has step 0."""
    base_models = [
        summary for summary in summaries if summary.step is None and not summary.checkpoint.startswith(TINKER)
    ]
    steps = {summary.step for summary in summaries} - {None}
    return base_models[0] if len(base_models) == 1 and steps and 0 not in steps else None


def _bars(summaries: Sequence[Summary]) -> list[list[float]]:
    found = [estimated.estimate for estimated in summaries]
    return [
        [estimated.mean - estimated.low for estimated in found],
        [estimated.high - estimated.mean for estimated in found],
    ]


def _dress(panel: Axes, name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.set_title(name, fontsize=10)
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.grid(alpha=0.25)
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize=8, frameon=False)
