"""The open decode batches, within the memory for keys and values, and the jobs that wait for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan, DecodeBatch
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.jobs import Run, Sample


class OutOfMemoryForNow(Exception):
    """A batch cannot open until running ones have ended."""


class Batches:
    """Opens a batch when a sample needs it, and queues samples for rows, first come first served."""

    def __init__(self, plan: BatchPlan, forward: ForwardPass) -> None:
        self.plan = plan
        self._forward = forward
        self._open: dict[BatchKey, DecodeBatch] = {}
        self._queues: dict[BatchKey, deque[Sample]] = {}

    @property
    def active(self) -> list[DecodeBatch]:
        """Batches with samples in them."""
        return [batch for batch in self._open.values() if batch.samples]

    def has_free_row(self, key: BatchKey) -> bool:
        """Whether a new sample of this key would start at once. Raises OutOfMemoryForNow."""
        return not self._queues.get(key) and self._batch(key).free_rows > 0

    def enqueue(self, sample: Sample) -> None:
        """Takes a sample that has its keys and values."""
        key = self.plan.key(sample.position, sample.run.adapter)
        self._queues.setdefault(key, deque()).append(sample)

    def fill(self) -> None:
        """Moves queued samples into free rows. Raises OutOfMemoryForNow while one waits for memory."""
        blocked = None
        for key in list(self._queues):
            try:
                self._fill(key)
            except OutOfMemoryForNow as error:
                blocked = error
        if blocked:
            raise blocked

    def discard(self, batch: DecodeBatch) -> None:
        """Closes a batch whose step failed."""
        self._open.pop(batch.key, None)

    def remove_finished(self) -> None:
        """Forgets samples whose job has ended."""
        for batch in self._open.values():
            batch.remove_finished()
        for key, queue in list(self._queues.items()):
            self._queues[key] = deque(sample for sample in queue if not sample.run.finished)

    def _fill(self, key: BatchKey) -> None:
        queue = self._queues[key]
        while queue and self._batch(key).free_rows:
            self._batch(key).place(queue.popleft())
        if not queue:
            del self._queues[key]

    def _batch(self, key: BatchKey) -> DecodeBatch:
        if key not in self._open:
            self._make_room(self.plan.nbytes(key.extent))
            self._open[key] = DecodeBatch(key, self.plan, self._forward)
        return self._open[key]

    def _make_room(self, needed_bytes: int) -> None:
        """Closes idle batches until a new one fits; one that fits never may still open alone."""
        capacity = self.plan.settings.kv_cache_bytes
        for key, batch in list(self._open.items()):
            if sum(open_batch.nbytes for open_batch in self._open.values()) + needed_bytes <= capacity:
                return
            if not batch.samples:
                del self._open[key]
        if self.active and sum(batch.nbytes for batch in self._open.values()) + needed_bytes > capacity:
            raise OutOfMemoryForNow


class WaitingJobs:
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
