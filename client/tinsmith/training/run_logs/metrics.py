"""The record of a run in `metrics.jsonl`, and the conversion of metrics to plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.files import write_whole

METRICS_FILE = "metrics.jsonl"
REPLACED_FILE = "metrics.replaced.jsonl"


class MetricsHistory:
    """The lines in `metrics.jsonl` that earlier processes of this run have written.

    Only one process at a time may write to the file.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._replaced = directory / REPLACED_FILE

    def last_step(self) -> int | None:
        """Return the highest logged step, or None if no step was logged."""
        return max((step for line in self._lines() if (step := _step_of(line)) is not None), default=None)

    def has_line_of(self, step: int, prefix: str) -> bool:
        """Return whether a line of the given step contains only metrics with names that begin with this prefix."""
        return any(
            _step_of(line) == step and all(name.startswith(prefix) for name in json.loads(line) if name != "step")
            for line in self._lines()
        )

    def forget_from(self, step: int) -> None:
        """Move the lines of `step` and later steps to `metrics.replaced.jsonl`, because these steps will be repeated.

        If a kill has cut off the last line, the last line is moved, too. Raises OSError.
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
    """Return the step of the line, or None if the line has no step or was not written by this library."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


Plain = bool | int | float | str
"""A value that JSON can represent. JSON cannot represent numbers of NumPy and PyTorch."""


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Plain]:
    """Convert numbers of NumPy and PyTorch to Python's numbers, and other values to strings."""
    return {name: _plain(value) for name, value in metrics.items()}


def numbers_of(metrics: Mapping[str, Plain]) -> dict[str, float]:
    """Return the metrics that a curve can show."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def _plain(value: Any) -> Plain:
    if type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]  # it is of one of these types
    if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 or _has_one_element(value):
        return _plain(value.item())
    return str(value)


def _has_one_element(value: Any) -> bool:
    """Return whether the value is a PyTorch tensor with one element.

    `numel` is used, because the `size` of a PyTorch tensor is a method.
    """
    count = getattr(value, "numel", None)
    return callable(count) and count() == 1
