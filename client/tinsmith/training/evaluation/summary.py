"""The results of a directory as estimates: for each checkpoint, task and metric one, and as a table of CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinsmith.training.evaluation.intervals import Estimate, estimate
from tinsmith.training.evaluation.results import Row

COLUMNS = ("checkpoint", "label", "step", "task", "metric", "mean", "low", "high", "examples")


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric of one task at one checkpoint. `values` are those of its examples, by their ids.

    Without examples, as evaluators of others give them, `values` is empty and the interval unknown.
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
    """By task and metric in the order of their first rows, then by step; base models first."""
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
    return sorted(summaries, key=lambda one: (-order[one.task, one.metric], _place(one.step)))


def csv_of(summaries: Iterable[Summary]) -> str:
    """With a line of names; an unknown step or bound is an empty field."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(COLUMNS)
    for one in summaries:
        found = one.estimate
        numbers = (found.mean, found.low, found.high)
        step = "" if one.step is None else one.step
        told = ["" if math.isnan(number) else repr(number) for number in numbers]
        table.writerow([one.checkpoint, one.label, step, one.task, one.metric, *told, found.examples])
    return written.getvalue()


def by_metric(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """`task/metric` to its summaries."""
    grouped: dict[str, list[Summary]] = {}
    for one in summaries:
        grouped.setdefault(one.name, []).append(one)
    return grouped


def shown(estimated: Estimate) -> str:
    """For people: the mean and its interval."""
    if math.isnan(estimated.low):
        return f"{estimated.mean:.3g}"
    return f"{estimated.mean:.3g} [{estimated.low:.3g}, {estimated.high:.3g}]"


def _summary(row: Row, task: str, metric: str, values: Mapping[str | None, float]) -> Summary:
    of_examples = {example: value for example, value in values.items() if example is not None}
    found = estimate(list(of_examples.values())) if of_examples else Estimate(values[None], math.nan, math.nan, 0)
    return Summary(row.checkpoint, row.label, row.step, task, metric, found, of_examples)


def _place(step: int | None) -> int:
    return -1 if step is None else step
