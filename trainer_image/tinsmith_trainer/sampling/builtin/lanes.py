"""What each tenant has in the sampler besides rows: the jobs that wait, and the prompt that is being computed."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tinsmith_trainer.sampling.builtin.batch import BatchKey
from tinsmith_trainer.sampling.builtin.jobs import Run
from tinsmith_trainer.sampling.builtin.model_cache.choice import AnyBatch, AnyPrefill


class WaitingJobs:
    """One queue per batch key, so that a full batch holds up only the jobs that need it."""

    def __init__(self) -> None:
        self._queues: dict[BatchKey, deque[Run]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, key: BatchKey, run: Run) -> None:
        """Behind the older ones of the key; one that waited for another key may be older than those that are there."""
        bisect.insort(self._queues.setdefault(key, deque()), run, key=lambda run: run.serial)
        self._length += 1

    def first(self, may_start: Callable[[BatchKey], bool]) -> Run | None:
        """The oldest job whose batch has a row for it."""
        for key in sorted(self._queues, key=lambda key: self._queues[key][0].serial):
            if may_start(key):
                return self._queues[key][0]
        return None

    def remove(self, key: BatchKey) -> None:
        """Takes out the first job of a key."""
        self._queues[key].popleft()
        self._length -= 1
        if not self._queues[key]:
            del self._queues[key]

    def remove_finished(self) -> None:
        """Takes out jobs that were ended from outside."""
        left = {key: deque(run for run in queue if not run.finished) for key, queue in self._queues.items()}
        self._queues = {key: queue for key, queue in left.items() if queue}
        self._length = sum(len(queue) for queue in self._queues.values())


@dataclass(slots=True)
class Lane:
    """A tenant's way through the sampler, in passes: some prompt tokens, then a step of each batch it has rows in.

    `prompt_tokens` are those computed since the last step, `to_step` the batches that are left of this pass.
    """

    tenant: str
    waiting: WaitingJobs = field(default_factory=WaitingJobs)
    prefills: list[AnyPrefill] = field(default_factory=list)
    prompt_tokens: int = 0
    to_step: list[AnyBatch] = field(default_factory=list)

    def remove_finished(self) -> None:
        """Lets go of jobs that were ended from outside."""
        self.waiting.remove_finished()
        self.prefills = [prefill for prefill in self.prefills if not prefill.run.finished]
