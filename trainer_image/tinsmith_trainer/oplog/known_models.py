"""The models of a worker, by phase.

Most of them are closed, and frequent tasks skip those.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from tinsmith_trainer.oplog.given_numbers import GivenNumbers
from tinsmith_trainer.oplog.journal_tables import ModelPhase
from tinsmith_trainer.oplog.model_queue import ModelQueue


class KnownModels:
    """Guarded by the lock of `ModelQueues`."""

    def __init__(self) -> None:
        self.all: dict[str, ModelQueue] = {}
        self.open: dict[str, ModelQueue] = {}
        """Models that may have turns, in the order of their creation."""
        self.corrupted: dict[str, ModelQueue] = {}
        self._with_keys: deque[tuple[float, ModelQueue]] = deque()  # closed ones, and since when

    def find(self, model_id: str) -> ModelQueue | None:
        return self.all.get(model_id)

    def add(self, queue: ModelQueue) -> None:
        self.all[queue.model_id] = queue
        if queue.is_open:
            self.open[queue.model_id] = queue
        else:
            self._note_closed(queue)

    def close(self, queue: ModelQueue, phase: ModelPhase, reason: str) -> None:
        """Mark the model so that none of its operations runs again, here or after a restart."""
        queue.phase, queue.reason = phase, reason
        self.open.pop(queue.model_id, None)
        self._note_closed(queue)
        for entry in [entry for entry in queue.entries.values() if entry.is_finished]:
            queue.settle(entry)

    def _note_closed(self, queue: ModelQueue) -> None:
        if queue.given.last:
            self._with_keys.append((time.monotonic(), queue))
        if queue.phase == "corrupted":
            self.corrupted[queue.model_id] = queue

    def remove(self, model_ids: Iterable[str]) -> list[ModelQueue]:
        """Return what was known of them."""
        gone = [self.all.pop(model_id) for model_id in model_ids]
        for queue in gone:
            self.open.pop(queue.model_id, None)
            self.corrupted.pop(queue.model_id, None)
        return gone

    def forget_keys(self, closed_before: float) -> None:
        """Drop the keys of models that were closed before this moment of the monotonic clock.

        A client repeats a submission within minutes. A model has up to 4,096 keys, in 750 KiB.
        """
        while self._with_keys and self._with_keys[0][0] < closed_before:
            _, queue = self._with_keys.popleft()
            queue.given = GivenNumbers(queue.given.last)
