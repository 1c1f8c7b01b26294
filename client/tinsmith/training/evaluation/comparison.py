"""Comparisons of evaluations. Each difference has a confidence interval."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation.intervals import Estimate, paired_difference
from tinsmith.training.evaluation.results import fingerprints_in, read_rows
from tinsmith.training.evaluation.summary import Summary, summaries_of

COLUMNS = (
    "metric",
    "step",
    "run",
    "mean",
    "low",
    "high",
    "examples",
    "difference",
    "difference_low",
    "difference_high",
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A metric of `run` at a step, and the paired difference from the first run.

    `difference` is None for the first run itself, and if no examples can be paired; `reason` says why.
    """

    run: str
    summary: Summary
    difference: Estimate | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The results in one directory. `fingerprints` distinguish different tasks with the same name."""

    summaries: Sequence[Summary]
    fingerprints: Mapping[str, str]


def read_runs(directories: Sequence[Path]) -> dict[str, Run]:
    """Read the results of several directories.

    The name of a run is the name of its directory, or the path if two directories have the same name.

    Raises ResultsUnfit, and EvaluationError for fewer than two directories.
    """
    if len({directory.resolve() for directory in directories}) < 2:
        raise EvaluationError("a comparison needs at least two directories")
    names = [directory.resolve().name for directory in directories]
    unique = len(set(names)) == len(names)
    return {
        name if unique else str(directory): Run(summaries_of(read_rows(directory)), fingerprints_in(directory))
        for name, directory in zip(names, directories, strict=True)
    }


def compare(runs: Mapping[str, Run]) -> list[Compared]:
    """Return the rows by metric and step. Every run except the first is compared with the first run."""
    first = next(iter(runs))
    reference = {_place(summary): summary for summary in runs[first].summaries}
    compared = [
        Compared(run, summary, *_difference(reference.get(_place(summary)), summary, runs[first], found))
        if run != first
        else Compared(run, summary, None)
        for run, found in runs.items()
        for summary in found.summaries
    ]
    metrics = list(dict.fromkeys(row.summary.name for row in compared))
    # The sort is stable, so the runs keep their order within a step.
    return sorted(compared, key=lambda row: (metrics.index(row.summary.name), _step(row.summary)))


def csv_of_comparison(compared: Sequence[Compared]) -> str:
    """Return the rows as CSV with a header. An unknown value is an empty cell."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in compared:
        found, difference = row.summary.estimate, row.difference
        step = "" if row.summary.step is None else row.summary.step
        numbers = [*_numbers(found), found.examples, *(_numbers(difference) if difference else ("", "", ""))]
        table.writerow([row.summary.name, step, row.run, *numbers])
    return written.getvalue()


def _difference(reference: Summary | None, summary: Summary, first: Run, run: Run) -> tuple[Estimate | None, str]:
    if reference is None:
        return None, "the first run does not have this step"
    if first.fingerprints.get(summary.task) != run.fingerprints.get(summary.task):
        return None, "another task: its examples or sampling differ"
    if not reference.values.keys() & summary.values.keys():
        return None, "no examples to pair"
    return paired_difference(reference.values, summary.values), ""


def _place(summary: Summary) -> tuple[str, int | str]:
    """Return a key that comparable summaries share: the metric and the step, or the metric and the base model."""
    return summary.name, summary.label if summary.step is None else summary.step


def _step(summary: Summary) -> int:
    return -1 if summary.step is None else summary.step


def _numbers(found: Estimate) -> list[str]:
    return ["" if math.isnan(number) else repr(number) for number in (found.mean, found.low, found.high)]
