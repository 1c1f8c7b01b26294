"""A plugin of pytest that writes each test's outcome as it comes: a run that is cut off leaves what it knows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

FILE = "TINSMITH_TEST_OUTCOMES"
"""The variable that names the file, one line of JSON for each test."""

Outcome = Literal["passed", "failed", "skipped"]
WORST_FIRST: tuple[Outcome, ...] = ("failed", "passed", "skipped")


@dataclass(frozen=True, slots=True)
class Result:
    """`test`: pytest's name of it, parameters included. `reason`: a failure's first line, or why it was skipped."""

    test: str
    outcome: Outcome
    reason: str


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order tests as they were asked for: pytest merges an argument into a later one that holds it."""
    asked = config.args
    items.sort(key=lambda item: next((at for at, name in enumerate(asked) if item.nodeid.startswith(name)), len(asked)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that cannot be imported is a failure of all its tests."""
    if report.failed:
        _write(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has passed with its call; it has failed or been skipped with any of its phases."""
    if report.when == "call" or report.outcome != "passed":
        _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason_of(report)}
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line.strip() for line in (crash.message if crash is not None else report.longreprtext).splitlines()]
    # Of a module that cannot be imported the error itself comes last, marked as pytest marks what was raised.
    raised = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return next((line for line in [*raised[-1:], *lines] if line), "no words")


def read_results(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def by_row(rows: Iterable[str], results: Iterable[Result]) -> Mapping[str, Result]:
    """Map each row that results speak of to the one that counts: a failure of any of its tests, else one that passed.

    A row is a test without its parameters, or a folder of tests.
    """
    found: dict[str, Result] = {}
    names = list(rows)
    for result in results:
        for row in (name for name in names if _speaks_of(result, name)):
            known = found.get(row)
            if known is None or WORST_FIRST.index(result.outcome) < WORST_FIRST.index(known.outcome):
                found[row] = result
    return found


def _speaks_of(result: Result, row: str) -> bool:
    """Whether it is of the row's test, of a test in the row's folder, or of the module that holds the row's test."""
    test = result.test.partition("[")[0]
    return test == row or test.startswith(f"{row}/") or row.startswith(f"{test}::")
