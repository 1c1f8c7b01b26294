"""The progress of a token server's engine.

vLLM's health check succeeds while its engine hangs, because another process answers it. So the steps of the engine are
counted, too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STALL_SECONDS = 300.0
"""The time without a step after which a server with requests counts as hung.

A step that computes one part of a long prompt may not be counted, and the first steps may compile kernels.
"""
STEPS = re.compile(r"^vllm:iteration_tokens_total_count(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def steps_of(metrics: str) -> float | None:
    """Return the number of steps of all engines in the text of /metrics, or None if the text has no such number."""
    counts = STEPS.findall(metrics)
    return sum(map(float, counts)) if counts else None


class StepWatch:
    """The requests of a server, and the time of its last step. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = 0
        self._steps: float | None = None
        self._moved_at = clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request for the time of the block."""
        if not self._requests:
            self._moved_at = self._clock()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def hangs(self, steps: float | None) -> bool:
        """Note the number of steps. Return whether the server has requests and has made no step for too long.

        A server whose steps are unknown never hangs.
        """
        if steps is None or steps != self._steps or not self._requests:
            self._steps, self._moved_at = steps, self._clock()
        return self._clock() - self._moved_at >= STALL_SECONDS
