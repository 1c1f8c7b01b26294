"""A snapshot that somebody asked for and that has not begun: those who ask before it begins share it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class AskedSnapshot:
    """Thread-safe. Its future resolves to the moment of the snapshot, in Unix seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: Future[float] | None = None

    def ask(self, arrange: Callable[[], None]) -> Future[float]:
        """The first one's `arrange` has it taken."""
        with self._lock:
            if self._asked is None:
                self._asked = Future()
                self._asked.set_running_or_notify_cancel()  # one who gives up must not take it from others
                arrange()
            return self._asked

    def begin(self) -> Future[float] | None:
        """From now on others ask for the next one. None: nobody has asked."""
        with self._lock:
            asked, self._asked = self._asked, None
            return asked
