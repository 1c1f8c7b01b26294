"""Saves in a background thread, one at a time. After a failed save, the next call raises the failure."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from threading import Lock, Thread

from tinsmith.training.errors import CheckpointError, SaveFailed


class BackgroundSaves:
    """A runner of saves, with at most one save at a time.

    On exit, the interpreter waits for the save, unless the save was abandoned.
    """

    def __init__(self) -> None:
        self._under_way: Future[None] | None = None
        self._step = 0
        # Two threads that save at once could each see the other's failure, or neither.
        self._lock = Lock()
        self.is_abandoned = False
        # Python would join the threads of an executor on exit, even after an interrupt.
        self._at_end = partial(_wait, weakref.ref(self))
        atexit.register(self._at_end)

    def start(self, step: int, save: Callable[[], None]) -> None:
        """Wait for the previous save, then start a new save.

        If the previous save failed, start no save and raise SaveFailed.
        """
        with self._lock:
            self._finish()
            self._step = step
            self._under_way = Future()
            work = partial(_run, save, self._under_way)
            Thread(target=work, name=f"tinsmith-checkpoint-{step}", daemon=True).start()

    def wait(self) -> None:
        """Wait for the save that is in progress. Raises SaveFailed once for each failure."""
        with self._lock:
            self._finish()

    def raise_failure(self) -> None:
        """Raise SaveFailed if a save has failed since the last call. Do not wait for a save in progress."""
        with self._lock:
            if self._under_way is not None and self._under_way.done():
                self._finish()

    def close(self) -> None:
        """Wait for the save that is in progress. Raises SaveFailed. A KeyboardInterrupt abandons the save."""
        try:
            self.wait()
        except KeyboardInterrupt:
            self.abandon()
            raise
        finally:
            atexit.unregister(self._at_end)

    def abandon(self) -> int | None:
        """Abandon the save that is in progress.

        Return the step of the abandoned save, or None if no save was in progress.

        Callers that wait for the abandoned save get SaveFailed.
        """
        self.is_abandoned = True
        atexit.unregister(self._at_end)
        under_way = self._under_way
        if under_way is None or not _settle(under_way, CheckpointError("the program was interrupted")):
            return None
        return self._step

    def _finish(self) -> None:
        if self._under_way is None:
            return
        failure = self._under_way.exception()
        # The outcome is cleared only now, because a caller that is interrupted while it waits has not seen the outcome.
        self._under_way = None
        if failure is not None:
            raise SaveFailed(self._step, failure) from failure


def _run(save: Callable[[], None], became: Future[None]) -> None:
    """Run the save in the background thread."""
    try:
        save()
    except BaseException as error:
        _settle(became, error)
    else:
        _settle(became, None)


def _settle(became: Future[None], failure: BaseException | None) -> bool:
    """Settle the future.

    Return False if the future was already settled. A future is settled when its save has ended or was abandoned.
    """
    try:
        became.set_exception(failure) if failure is not None else became.set_result(None)
    except InvalidStateError:
        return False
    return True


def _wait(saves: weakref.ref[BackgroundSaves]) -> None:
    """Wait for the save in progress when the interpreter exits.

    Programs that do not use the manager as a context need the wait at the exit of the interpreter.
    """
    left = saves()
    if left is not None and left._under_way is not None:
        left._under_way.exception()
