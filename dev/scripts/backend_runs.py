"""The recorded runs of a backend on a CPU, with the differences from the results of the PEFT engine.

Each run writes docs/*-runs.toml.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
KEYS = ("test", "what", "tolerance", "deviation", "commit", "date")
HEADER = ("What", "Differed by", "On")

Run = dict[str, str]


@dataclass(frozen=True, slots=True)
class BackendRuns:
    """The runs of one backend, which `file` records and the table in `page` shows.

    `name`: the key in the file for the backend's commit.
    """

    name: str
    file: Path
    page: str
    target: str

    def runs(self) -> list[Run]:
        """Return the recorded runs. Raises ValueError for an entry without a subject, place or time."""
        found: list[dict[str, Any]] = self._read()["run"]
        for entry in found:
            if set(entry) != set(KEYS):
                raise ValueError(f"{entry.get('test')}: a run has {', '.join(KEYS)}")
        return found

    def pin(self) -> str:
        """Return the commit of the backend, which is the same in all recorded runs."""
        return str(self._read()[self.name])

    def rows(self) -> Iterator[tuple[str, ...]]:
        for run in self.runs():
            yield run["what"], run["deviation"], run["date"]

    def note(self, run: Run, pin: str) -> None:
        """Record this run, and remove the previous run of the same test.

        Delete runs of another commit of the backend.
        """
        before = self.runs() if self.file.exists() and self.pin() == pin else []
        self._write([*(other for other in before if other["test"] != run["test"]), run], pin)

    def _read(self) -> dict[str, Any]:
        return tomllib.loads(self.file.read_text())

    def _write(self, found: list[Run], pin: str) -> None:
        tables = [
            "\n".join(["[[run]]", *(f"{key} = {_quoted(run[key])}" for key in KEYS)])
            for run in sorted(found, key=lambda run: run["test"])
        ]
        head = f"{self._head()}{self.name} = {_quoted(pin)}\n"
        self.file.write_text("\n".join([head, "\n\n".join(tables), ""]))

    def _head(self) -> str:
        return (
            f"# Written by `{self.target}`: the last run of each of its tests that passed. `make docs` writes the "
            f"table of\n# docs/{self.page} from it. Differences from the PEFT engine are the largest of a logprob, of "
            f"the gradient's norm\n# (relative), and of a weight after the last step.\n"
        )


NEMO_RL = BackendRuns("nemo_rl", DOCS / "nemo-rl-runs.toml", "how-to/nemo-rl.md", "make test-nemo-rl")
MILES = BackendRuns("miles", DOCS / "miles-runs.toml", "how-to/miles.md", "make test-miles")


def _quoted(value: str) -> str:
    """Return the TOML string. JSON strings are valid in TOML."""
    return json.dumps(value, ensure_ascii=False)
