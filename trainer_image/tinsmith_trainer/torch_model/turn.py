"""Who may compute now: one lock, first come first served, around one unit of work.

The engine and the sampler share the processor. A microbatch or a decode step takes a turn,
so that neither starves: a plain lock would let the thread that just released it win again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceTurn:
    """A fair lock. `with turn.taken(): …` waits behind all who asked before."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._busy = False

    @property
    def waiting(self) -> int:
        """How many threads stand in line behind the one that computes."""
        with self._guard:
            return len(self._waiting)

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._wait()
        try:
            yield
        finally:
            self._pass_on()

    def _wait(self) -> None:
        with self._guard:
            if not self._busy:
                self._busy = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._busy = False
