"""Outcomes of tests, as the plugin `outcomes` writes them: read, and counted by row.

Without pytest, which the machine of a run may lack until its wheels are installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


def read_results(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def by_row(rows: Iterable[str], results: Iterable[Result]) -> Mapping[str, Result]:
    """Map each row that results speak of to the one that counts: a failure of any of its tests, else one that passed.

    A row is a test without its parameters, a module of tests, or a folder of them.
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
    """Return whether the result is of the row's test, of its module or folder, or of the module of the row's test."""
    test = result.test.partition("[")[0]
    return test == row or test.startswith((f"{row}/", f"{row}::")) or row.startswith(f"{test}::")
