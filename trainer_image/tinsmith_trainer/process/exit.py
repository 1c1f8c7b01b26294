"""Exits of a process that cannot continue after an error. The parent starts a new process, which recovers."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog

from tinsmith_trainer.process.in_flight_marker import InFlightMarker

log = structlog.get_logger(__name__)

T = TypeVar("T")

_markers: weakref.WeakSet[InFlightMarker] = weakref.WeakSet()


def register_marker(marker: InFlightMarker) -> None:
    """Register the marker that exits of this process use.

    Before an exit, the process records in the marker whether the engine's call is the reason.
    """
    _markers.add(marker)


def end_process(failure: str) -> None:
    """Log the current exception and exit at once.

    The exit does not wait for threads, because threads of a broken process may never end.
    """
    try:
        log.exception(failure)
        for marker in tuple(_markers):
            marker.sign(f"{failure}: {sys.exception()}")
    finally:
        os._exit(1)


def end_without_blame() -> None:
    """Exit at once for a reason that is unrelated to the engine's call."""
    for marker in tuple(_markers):
        marker.stop()
    os._exit(1)


@contextlib.contextmanager
def fatal_on_error(
    failure: str, *, blames_the_call: bool = True, unless: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """End the process after an error inside this context. A new process replays the operations.

    If the broken process did not end, every operation would wait without end on a worker that reports to be ready.
    `blames_the_call`: the engine's call counts as the reason. `unless`: the errors for which the process does not end,
    because the caller handles them.
    """
    try:
        yield
    except unless:
        raise
    except BaseException:
        if blames_the_call:
            end_process(failure)
            return
        log.exception(failure)
        end_without_blame()


def fatal_callback(failure: str, callback: Callable[[T], None]) -> Callable[[T], None]:
    """Return a callback for a future. If the callback raises an error, the process ends.

    `concurrent.futures` would only log the error. After a logged error, an acknowledged operation would never run,
    although the process seems healthy.
    """

    def call(done: T) -> None:
        with fatal_on_error(failure, blames_the_call=False):
            callback(done)

    return call
