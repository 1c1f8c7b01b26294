"""Saves in progress. The engine's thread copies an adapter, and another thread writes the copy.

The next operations of the model wait until the save is written. Other models continue, because only the copy needs the
engine's thread. The engine's thread also finishes the save.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.oplog import result_tables
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.process.exit import fatal_on_error
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import InFlightMarker, InFlightWork
from tinsmith_trainer.training.executor import CopiedSave, Executor

MOST_SAVES = 2
"""The maximum number of concurrent saves. Each save has a thread and a copy of an adapter.

For a training checkpoint, the copy includes moments. A further save waits for a slot, and the adapter is copied when
the save begins.
"""


@dataclass(slots=True)
class _Save:
    queue: ModelQueue
    work: InFlightWork
    written: Future[OperationResult] = field(default_factory=Future)
    started_at: float = field(default_factory=time.monotonic)


class Saves:
    """The saves in progress.

    Used by the engine's thread, except for the writes. Other threads may ask which models are being saved.
    """

    def __init__(
        self,
        executor: Executor,
        queues: ModelQueues,
        journal: Journal,
        attempts: Attempts,
        marker: InFlightMarker,
    ) -> None:
        self._executor = executor
        self._queues = queues
        self._journal = journal
        self._attempts = attempts
        self._marker = marker
        self._saves: dict[str, _Save] = {}
        self._waiting: list[ModelQueue] = []

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._saves

    def running_seconds(self) -> float:
        """Return how long the write of the oldest save has run, or 0 if no save is in progress. Thread-safe."""
        started = [save.started_at for save in list(self._saves.values()) if not save.written.done()]
        return time.monotonic() - min(started) if started else 0.0

    def must_wait(self, queue: ModelQueue, entry: Entry) -> bool:
        """Hold the model if the next operation is a save and no slot for saves is free.

        So no adapter is restored for a save that cannot begin.

        Return whether the model is held.
        """
        is_save = entry.operation.kind == worker_pb2.SAVE_WEIGHTS and not entry.is_finished
        if not is_save or not self._is_full_for(queue) or self._attempts.is_suspect(entry.work):
            return False
        self._wait_for_slot(queue)
        return True

    def _is_full_for(self, queue: ModelQueue) -> bool:
        """Return whether the model's save must wait for a slot.

        A tenant has only one slot while another tenant waits. A copy costs few tokens, so with fair shares alone, one
        tenant could use all slots.
        """
        owners = {save.queue.owner for save in self._saves.values()}
        return len(self._saves) >= MOST_SAVES or (queue.owner in owners and self._others_wait(queue))

    def _others_wait(self, queue: ModelQueue) -> bool:
        return any(
            waiting.owner != queue.owner and waiting.is_open and not waiting.quarantined for waiting in self._waiting
        )

    def _wait_for_slot(self, queue: ModelQueue) -> None:
        self._queues.hold(queue, math.inf)
        if all(waiting is not queue for waiting in self._waiting):
            self._waiting.append(queue)

    def begin(
        self, queue: ModelQueue, entry: Entry, request: worker_pb2.SaveWeights, epoch: int, releases: str | None
    ) -> Future[OperationResult] | None:
        """Copy the adapter, and start to write the copy. The model is held until `outcome` has a result.

        If no slot is free, return None, and the model waits for a slot.
        """
        if self._is_full_for(queue):
            self._wait_for_slot(queue)
            return None
        copied = self._copy(queue, entry, request, epoch, releases)
        save = self._saves[queue.model_id] = _Save(queue, entry.work)
        self._mark()
        try:
            threading.Thread(target=self._write, args=(save, copied), name="saver", daemon=True).start()
        except RuntimeError:  # the limit of threads may be reached
            del self._saves[queue.model_id]
            self._mark()
            raise
        # Only this thread reads the queues, so it does not miss a save that has ended already.
        self._queues.hold(queue, math.inf)
        return save.written

    def write_alone(
        self, queue: ModelQueue, entry: Entry, request: worker_pb2.SaveWeights, epoch: int, releases: str | None
    ) -> OperationResult:
        """Write the save of a suspected operation in this thread, while no other work runs.

        If the process ends again, the save is known to be the cause.
        """
        return self._executor.write(self._copy(queue, entry, request, epoch, releases))

    def _copy(
        self, queue: ModelQueue, entry: Entry, request: worker_pb2.SaveWeights, epoch: int, releases: str | None
    ) -> CopiedSave:
        self._waiting = [waiting for waiting in self._waiting if waiting is not queue]  # even if the copy fails
        copied = self._executor.copy(entry.operation, request, epoch, self._latest(queue.model_id, request))
        return replace(copied, releases=releases)

    def _latest(self, model_id: str, request: worker_pb2.SaveWeights) -> int:
        """Return the event of this model's latest save with the requested name, or 0 if no save has this name."""
        if not request.name or request.overwrite:
            return 0
        self._journal.settle(model_id)  # the previous save may not be on disk yet
        return self._journal.read(
            lambda db: result_tables.saved_name_event(db, model_id, request.kind, request.name)
        ).result()

    def outcome(self, queue: ModelQueue) -> OperationResult | None:
        """Return the result of the model's save.

        A result is returned only once. Return None if the save is not written yet.

        Raises the error of the thread that writes.
        """
        save = self._saves.pop(queue.model_id, None)
        if save is None:
            return None
        self._mark()
        for waiting in self._waiting:
            self._queues.hold(waiting, 0.0)  # each model stays on the list until it has a slot
        try:
            return save.written.result()
        finally:
            # An error refers to its frames, and the frames to the copy. A reference cycle would keep the copy for a
            # long time.
            save.written = Future()

    def _write(self, save: _Save, copied: CopiedSave) -> None:
        # also for errors that are not Exceptions, such as a panic of a library
        with fatal_on_error("a save could not be written"):
            try:
                reach("save-before-write")
                save.written.set_result(self._executor.write(copied))
            except Exception as error:
                save.written.set_exception(error)

    def is_written(self, queue: ModelQueue) -> bool:
        """Return whether `outcome` has a result for this model."""
        save = self._saves.get(queue.model_id)
        return save is not None and save.written.done()

    def wait(self) -> None:
        """Wait until no write of a save is in progress.

        If the process ends after this wait, only one cause is possible.
        """
        for save in self._saves.values():
            save.written.exception()
        self._mark()

    def wait_at_stop(self) -> Iterator[ModelQueue]:
        """Wait for each save during a stop, and yield the model of the save. After a stop, no more turns begin.

        Each model is yielded before the wait for the next save, because a storage that blocks must not delay the result
        of a written save.
        """
        for save in list(self._saves.values()):
            save.written.exception()
            yield save.queue

    def _mark(self) -> None:
        self._marker.mark_background("saves", *(save.work for save in self._saves.values() if not save.written.done()))
