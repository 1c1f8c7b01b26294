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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has passed with its call; it has failed or been skipped with any of its phases."""
    if report.when != "call" and report.outcome == "passed":
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason_of(report)}
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def reason_of(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return next((line.strip() for line in text.splitlines() if line.strip()), "no words")


def read_results(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def by_row(rows: Iterable[str], results: Iterable[Result]) -> Mapping[str, Result]:
    """Of each row that results speak of, the one that counts: a failure of any of its parameters, else one that passed.

    A row is a test without its parameters, or a folder of tests.
    """
    found: dict[str, Result] = {}
    names = list(rows)
    for result in results:
        test = result.test.partition("[")[0]
        row = next((name for name in names if test == name or test.startswith(f"{name}/")), None)
        if row is None:
            continue
        known = found.get(row)
        if known is None or WORST_FIRST.index(result.outcome) < WORST_FIRST.index(known.outcome):
            found[row] = result
    return found
