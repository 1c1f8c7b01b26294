"""Ends the process where it could only go on failing: whoever started it starts a new one, which recovers."""

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


def tell_at_the_end(marker: InFlightMarker) -> None:
    """Whatever ends this process by itself says there whether the engine's call is why."""
    _markers.add(marker)


def end_process(failure: str) -> None:
    """Logs the exception that is being handled, and ends at once: threads of a broken process may never join."""
    try:
        log.exception(failure)
        for marker in tuple(_markers):
            marker.sign(f"{failure}: {sys.exception()}")
    finally:
        os._exit(1)


def end_without_blame() -> None:
    """Ends at once for a reason that has nothing to do with what the engine is at."""
    for marker in tuple(_markers):
        marker.stop()
    os._exit(1)


@contextlib.contextmanager
def fatal_on_error(
    failure: str, *, blames_the_call: bool = True, unless: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Without this every operation would wait for ever, on a worker that says it is ready. A new process replays.

    `blames_the_call`: what the engine is at counts as the reason. `unless`: errors that the caller handles.
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
    """Return a callback for a future of the journal, whose error ends the process.

    `concurrent.futures` only logs it: what was acknowledged would never run, in a process that looks well.
    """

    def call(done: T) -> None:
        with fatal_on_error(failure, blames_the_call=False):
            callback(done)

    return call
