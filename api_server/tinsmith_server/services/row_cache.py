"""Rows that were read a moment ago: a pipelined run asks for the same two hundreds of times a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RowCache(Generic[K, V]):
    """A cache whose entries live for seconds. Another replica's change shows when they are over."""

    def __init__(self, seconds: float, entries: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._entries = entries
        self._clock = clock
        self._kept: dict[K, tuple[V, float]] = {}

    def get(self, key: K) -> V | None:
        value, until = self._kept.get(key, (None, 0.0))
        return value if self._clock() < until else None

    def put(self, key: K, value: V) -> None:
        if len(self._kept) >= self._entries:
            self._kept.clear()
        self._kept[key] = (value, self._clock() + self._seconds)

    def forget(self, key: K) -> None:
        self._kept.pop(key, None)
