"""The table of docs/reference/recipes.md: what each program's last run by `make recipes` found."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from support.recipes.program import Program
from support.recipes.running import Run

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "recipes.md"
BEGIN, END = "<!-- written by `make recipes` -->", "<!-- until here -->"
HEADER = ("Program", "Passed on")
PLUMBING = {"retrieve_future", "metrics", "config", "dynamic_config", "session_heartbeat", "get_info", "checkpoints"}
"""Requests that the SDK makes by itself."""
NOTHING = "-"
FAILED = "**failed**"

Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program: either `run` or `failure`."""

    program: Program
    run: Run | None = None
    failure: str = ""

    @property
    def seconds(self) -> str:
        return f"{self.run.seconds:.0f}" if self.run else NOTHING

    @property
    def counters(self) -> str:
        if self.run is None:
            return NOTHING
        asked = {route: count for route, count in sorted(self.run.requests.items()) if route not in PLUMBING}
        said = [f"{count} `{route}`" for route, count in asked.items()]
        return ", ".join([*said, f"{self.run.operations['done']} operations done"])

    @property
    def row(self) -> Cells:
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        return (self.program.name, f"{FAILED} ({day})" if self.failure else day)


def with_outcome(page: str, outcome: Outcome, programs: Sequence[Program]) -> str:
    """Return the page with this row instead of the program's last one, and without rows of deleted programs."""
    rows = {**rows_of(page), outcome.program.name: outcome.row}
    kept = [rows[program.name] for program in programs if program.name in rows]
    versions = (
        f"Python {platform.python_version()}, tinker-cookbook {version('tinker-cookbook')}, tinker {version('tinker')}."
        f" {sum(not row[-1].startswith(FAILED) for row in kept)} of {len(programs)} programs passed."
    )
    lines = [HEADER, tuple("---" for _ in HEADER), *kept]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:begin]}\n\n{versions}\n\n{table}\n\n{page[end:]}"


def rows_of(page: str) -> Mapping[str, Cells]:
    """Return the rows of a page by the program's name."""
    lines = page[page.index(BEGIN) : page.index(END)].splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows[2:]}
