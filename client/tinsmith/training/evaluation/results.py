"""The results of a sweep.

The results file has one line of JSON for each example at each checkpoint. A killed sweep resumes from the results file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinsmith.training.errors import ResultsUnfit
from tinsmith.training.evaluation.examples import ExampleResult, Scores

RESULTS_FILE, TASKS_FILE = "results.jsonl", "tasks.json"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of an example at a checkpoint.

    `example` is None if an evaluator returns only metrics over all examples. `checkpoint` is the `tinker://` path of
    the weights, or the name of a base model. `label` is the name of the checkpoint for people.
    """

    checkpoint: str
    label: str
    step: int | None
    task: str
    example: str | None
    scores: Scores
    answers: Sequence[Mapping[str, Any]] = ()

    @property
    def key(self) -> tuple[str, str, str | None]:
        return self.checkpoint, self.task, self.example


class Results:
    """A context for the results in one directory.

    Only one process at a time may be inside a context for the same directory.

    Entering the context raises ResultsUnfit if the results cannot be used.

    The line of an example is written in one call when the example is done. After a kill, at most one line is
    incomplete. The next sweep removes an incomplete line. A crash of the machine may lose the last few lines.
    """

    def __init__(self, directory: Path, fingerprints: Mapping[str, str]) -> None:
        self._directory = directory
        self._fingerprints = dict(fingerprints)
        self._file = -1
        self.rows: list[Row] = []
        self.done: set[tuple[str, str, str | None]] = set()

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._directory / RESULTS_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._take()
            _cut_to_whole_lines(self._file)
            self._require_same_tasks()
            self.rows = list(read_rows(self._directory))
            self.done = {row.key for row in self.rows}
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def add(self, row: Row) -> None:
        os.write(self._file, (json.dumps(asdict(row), allow_nan=False) + "\n").encode())
        self.rows.append(row)
        self.done.add(row.key)

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsUnfit(f"another evaluation is writing to {self._directory}") from None

    def _require_same_tasks(self) -> None:
        """Raise ResultsUnfit if the directory has results of a different task with the same name."""
        path = self._directory / TASKS_FILE
        known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        for name, fingerprint in self._fingerprints.items():
            if known.get(name, fingerprint) != fingerprint:
                raise ResultsUnfit(
                    f"{self._directory} has results of another task {name}: examples, sampling or rendering differ. "
                    "Use another directory for this evaluation"
                )
        merged = known | self._fingerprints
        if merged != known:
            written = path.with_suffix(".writing")
            written.write_text(json.dumps(merged, indent=2))
            written.rename(path)


def read_rows(directory: Path) -> Iterator[Row]:
    """Yield the rows. An incomplete last line is left out.

    Raises ResultsUnfit for other damage, and for a directory without results.
    """
    path = directory / RESULTS_FILE
    if not path.exists():
        raise ResultsUnfit(f"there are no results in {directory}")
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield Row(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ResultsUnfit(f"{path}:{number}: not the result of an example: {error}") from error


def fingerprints_in(directory: Path) -> dict[str, str]:
    path = directory / TASKS_FILE
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def described(result: ExampleResult) -> list[dict[str, Any]]:
    """Return the answers in the form of a row."""
    return [asdict(answer) for answer in result.answers]


def _cut_to_whole_lines(file: int) -> None:
    content = os.pread(file, os.fstat(file).st_size, 0)
    if content and not content.endswith(b"\n"):
        os.ftruncate(file, content.rfind(b"\n") + 1)
