"""Saves in a thread, one after the other, whose failures come to light at the next call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from tinsmith.training.errors import SaveFailed


class BackgroundSaves:
    """At most one save is under way. The interpreter waits for it at its end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tinsmith-checkpoint")
        self._under_way: Future[None] | None = None
        self._step = 0
        # Two threads that save at once would each see the other's failure, or neither.
        self._lock = Lock()

    def start(self, step: int, save: Callable[[], None]) -> None:
        """Waits for the save before this one. Raises SaveFailed for it, and then starts nothing."""
        with self._lock:
            self._finish()
            self._step = step
            self._under_way = self._thread.submit(save)

    def wait(self) -> None:
        """Returns when nothing is under way. Raises SaveFailed, once for each failure."""
        with self._lock:
            self._finish()

    def raise_failure(self) -> None:
        """Waits for nothing. Raises SaveFailed for a save that has failed since the last call."""
        with self._lock:
            if self._under_way is not None and self._under_way.done():
                self._finish()

    def close(self) -> None:
        """Waits, takes no more, and raises SaveFailed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        if (failure := under_way.exception()) is not None:
            raise SaveFailed(self._step, failure) from failure
