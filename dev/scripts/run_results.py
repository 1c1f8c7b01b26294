"""The outcomes of tests that the plugin `outcomes` has written, and the outcome of each row of a table.

This module does not need pytest, because a machine may not have pytest before the wheels are installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FILE = "TINSMITH_TEST_OUTCOMES"
"""The environment variable that names the file of outcomes. This file has one line of JSON for each test."""

Outcome = Literal["passed", "failed", "skipped"]
WORST_FIRST: tuple[Outcome, ...] = ("failed", "passed", "skipped")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a test. `test`: pytest's name of the test, including the parameters.

    `reason`: the first line of the failure, or the reason why the test was skipped.
    """

    test: str
    outcome: Outcome
    reason: str


def read_results(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def by_row(rows: Iterable[str], results: Iterable[Result]) -> Mapping[str, Result]:
    """Map each row to the result that counts: a failure if any test of the row failed, otherwise a test that passed.

    A row is a test without parameters, a module of tests, or a folder of modules.
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
    """Return whether the result belongs to the row's test, module or folder, or to the module of the row's test."""
    test = result.test.partition("[")[0]
    return test == row or test.startswith((f"{row}/", f"{row}::")) or row.startswith(f"{test}::")
