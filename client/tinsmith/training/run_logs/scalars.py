"""Metrics as every backend takes them: plain numbers and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Plain = bool | int | float | str
"""None of them is a NumPy or PyTorch number, which JSON does not know."""


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Plain]:
    """NumPy's and PyTorch's numbers become Python's; what is no single value becomes its `str`."""
    return {name: _plain(value) for name, value in metrics.items()}


def numbers_of(metrics: Mapping[str, Plain]) -> dict[str, float]:
    """Those that can be drawn as a curve."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def _plain(value: Any) -> Plain:
    if type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]  # it is of one of these types
    if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 or _has_one_element(value):
        return _plain(value.item())
    return str(value)


def _has_one_element(value: Any) -> bool:
    """Of a PyTorch tensor, whose `size` is a method."""
    count = getattr(value, "numel", None)
    return callable(count) and count() == 1
