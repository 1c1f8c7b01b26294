"""`metrics.jsonl` of a run that is killed and goes on: each step is in it once."""

from __future__ import annotations

import json
from pathlib import Path

from tinsmith.training.whole_files import write_whole

METRICS_FILE = "metrics.jsonl"
REPLACED_FILE = "metrics.replaced.jsonl"


class MetricsHistory:
    """The lines that earlier processes of this run wrote. One process at a time writes them."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._replaced = directory / REPLACED_FILE

    def last_step(self) -> int | None:
        """The highest that was logged; None without any."""
        return max((step for line in self._lines() if (step := _step_of(line)) is not None), default=None)

    def has_line_of(self, step: int, prefix: str) -> bool:
        """One of that step with nothing else than metrics whose names begin so."""
        return any(
            _step_of(line) == step and all(name.startswith(prefix) for name in json.loads(line) if name != "step")
            for line in self._lines()
        )

    def forget_from(self, step: int) -> None:
        """The run is at `step` again: lines of it and of later ones move to `metrics.replaced.jsonl`.

        So does a line that a kill cut off. Raises OSError.
        """
        lines = self._lines()
        replaced = [line for line in lines if _is_replaced(line, step)]
        if not replaced:
            return
        kept = b"".join(line for line in lines if not _is_replaced(line, step))
        with self._replaced.open("ab") as file:
            file.write(b"".join(line.rstrip(b"\n") + b"\n" for line in replaced))
        write_whole(self._path, kept)

    def _lines(self) -> list[bytes]:
        return self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []


def _is_replaced(line: bytes, step: int) -> bool:
    logged = _step_of(line)
    return not line.endswith(b"\n") or (logged is not None and logged >= step)


def _step_of(line: bytes) -> int | None:
    """None for what has no step, and for what is no line of ours."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None
