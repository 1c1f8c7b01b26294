"""Notices the death of a rank while nobody calls it: the next call should find a worker that is back already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from tinsmith_trainer.process.exit import end_process

EVERY_SECONDS = 1.0


def end_the_worker() -> None:
    """In the handler of the error that tells of the loss. A new process brings new ranks."""
    end_process("a rank of the model is gone")


class RankWatch:
    """A thread that asks each of Ray's actors, now and then, for a sign of life.

    A rank that is busy answers after its call, so one question at a time is under way to each, and none is in a hurry.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        on_lost: Callable[[], None] = end_the_worker,
        *,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        """`on_lost` is called once, from the thread, while the error is handled."""
        self._actors = actors
        self._on_lost = on_lost
        self._every_seconds = every_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before the ranks are ended on purpose. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        questions = [_ask(actor) for actor in self._actors]
        while not self._closed.wait(self._every_seconds):
            try:
                questions = [_renewed(actor, asked) for actor, asked in zip(self._actors, questions, strict=True)]
            except RayError:
                self._on_lost()
                return


def _renewed(actor: Any, asked: Any) -> Any:
    """The next question where this one was answered. Raises RayError where it never will be."""
    answered, _ = ray.wait([asked], timeout=0)
    if not answered:
        return asked
    ray.get(asked)
    return _ask(actor)


def _ask(actor: Any) -> Any:
    """Every actor of Ray has this method."""
    return actor.__ray_ready__.remote()
