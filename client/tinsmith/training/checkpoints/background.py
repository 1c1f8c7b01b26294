"""Saves in a thread, one after the other, whose failures come to light at the next call."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from threading import Lock, Thread

from tinsmith.training.errors import CheckpointError, SaveFailed


class BackgroundSaves:
    """At most one save is under way. The interpreter waits for it at its end, unless it was left."""

    def __init__(self) -> None:
        self._under_way: Future[None] | None = None
        self._step = 0
        # Two threads that save at once would each see the other's failure, or neither.
        self._lock = Lock()
        self.is_abandoned = False
        # Python joins the threads of an executor at its end, whatever they wait for: these are left where they are.
        self._at_end = partial(_wait, weakref.ref(self))
        atexit.register(self._at_end)

    def start(self, step: int, save: Callable[[], None]) -> None:
        """Waits for the save before this one. Raises SaveFailed for it, and then starts nothing."""
        with self._lock:
            self._finish()
            self._step = step
            self._under_way = Future()
            work = partial(_run, save, self._under_way)
            Thread(target=work, name=f"tinsmith-checkpoint-{step}", daemon=True).start()

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
        """Waits, and raises SaveFailed. Somebody who does not want to wait, and interrupts it, leaves the save."""
        try:
            self.wait()
        except KeyboardInterrupt:
            self.abandon()
            raise
        finally:
            atexit.unregister(self._at_end)

    def abandon(self) -> int | None:
        """Who waits for the save that is under way is told that it failed. Returns its step; None without one."""
        self.is_abandoned = True
        atexit.unregister(self._at_end)
        under_way = self._under_way
        if under_way is None or not _settle(under_way, CheckpointError("it was left when the program was interrupted")):
            return None
        return self._step

    def _finish(self) -> None:
        if self._under_way is None:
            return
        failure = self._under_way.exception()
        # Not before: who is interrupted while it waits has not seen what became of the save.
        self._under_way = None
        if failure is not None:
            raise SaveFailed(self._step, failure) from failure


def _run(save: Callable[[], None], became: Future[None]) -> None:
    """In the thread."""
    try:
        save()
    except BaseException as error:
        _settle(became, error)
    else:
        _settle(became, None)


def _settle(became: Future[None], failure: BaseException | None) -> bool:
    """False where it was settled before: a save ends, or is left."""
    try:
        became.set_exception(failure) if failure is not None else became.set_result(None)
    except InvalidStateError:
        return False
    return True


def _wait(saves: weakref.ref[BackgroundSaves]) -> None:
    """At the end of a program without a `with`, whose last save is nobody else's to wait for."""
    left = saves()
    if left is not None and left._under_way is not None:
        left._under_way.exception()
