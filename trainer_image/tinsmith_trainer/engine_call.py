"""The call that the engine is at: for how long, which is how a hang is told from work, and for what."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tinsmith_trainer.running_mark import RunningMark, Work


class EngineCall:
    """One call at a time, by the engine's thread; anyone may ask.

    While it runs it is marked, so that the next process knows what this one ended of.
    """

    def __init__(self, mark: RunningMark) -> None:
        self.mark = mark
        self._started_at: float | None = None

    def running_seconds(self) -> float:
        """0: idle."""
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    @contextlib.contextmanager
    def at(self, work: Work) -> Iterator[None]:
        """Around the call. An error that ends the process, such as SystemExit, leaves the mark."""
        self.mark.set(work)
        self._started_at = time.monotonic()
        try:
            yield
        except Exception:
            self.mark.clear()
            raise
        else:
            self.mark.clear()
        finally:
            self._started_at = None

    def told_to_stop(self, hang_seconds: float) -> bool:
        """Whether the stop is an orderly one: whatever ends this process now, the call that runs is not to blame.

        False: the call has run for so long that it is why the process is told to stop.
        """
        seconds = self.running_seconds()
        hangs = seconds >= hang_seconds
        self.mark.stop(f"it was still running after {seconds:.0f} s, when the worker was told to stop" if hangs else "")
        return not hangs
