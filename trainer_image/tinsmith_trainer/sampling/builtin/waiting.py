"""Jobs that have not started, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tinsmith_trainer.sampling.builtin.batch import BatchKey
from tinsmith_trainer.sampling.builtin.jobs import Run


class WaitingLine:
    """One queue per batch key, so that a full batch holds up only the jobs that need it."""

    def __init__(self) -> None:
        self._queues: dict[BatchKey, deque[Run]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, key: BatchKey, run: Run) -> None:
        self._queues.setdefault(key, deque()).append(run)
        self._length += 1

    def next(self, has_free_row: Callable[[BatchKey], bool]) -> Run | None:
        """Takes out the oldest job whose batch has a free row."""
        for key in sorted(self._queues, key=lambda key: self._queues[key][0].serial):
            if has_free_row(key):
                run = self._queues[key].popleft()
                self._tidy(key)
                return run
        return None

    def remove_finished(self) -> None:
        """Takes out jobs that were ended from outside."""
        for key in list(self._queues):
            self._queues[key] = deque(run for run in self._queues[key] if not run.finished)
            self._tidy(key)
        self._length = sum(len(queue) for queue in self._queues.values())

    def _tidy(self, key: BatchKey) -> None:
        self._length = sum(len(queue) for queue in self._queues.values())
        if not self._queues[key]:
            del self._queues[key]
