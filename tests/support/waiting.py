"""Waiting for what another process will come to."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_SECONDS = 0.02


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Check repeatedly, and fail when the condition is not true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(LOOK_SECONDS)
