"""Saves under way: their adapters are copied in the engine's thread, and the copies written in threads of their own.

The model of a save waits for it, as an operation waits for the one before it. Other models go on, and nothing of a save
but its copy takes any of the engine's time. What comes of it is decided in the engine's thread again.
"""

from __future__ import annotations

import math
import threading
import time
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
"""Each holds a copy of an adapter, moments included for a training checkpoint, and has a thread. One more waits, and
its adapter is not copied before."""


@dataclass(slots=True)
class _Save:
    queue: ModelQueue
    work: InFlightWork
    written: Future[OperationResult] = field(default_factory=Future)
    started_at: float = field(default_factory=time.monotonic)


class Saves:
    """Of the engine's thread, but for the writing itself; others may ask which models are in it."""

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
        """Of the one that is being written for the longest time; 0: none is. Thread-safe."""
        started = [save.started_at for save in list(self._saves.values()) if not save.written.done()]
        return time.monotonic() - min(started) if started else 0.0

    def must_wait(self, queue: ModelQueue, entry: Entry) -> bool:
        """Whether this model's turn is a save without a place. Then it is held, and no adapter is fetched for it."""
        is_save = entry.operation.kind == worker_pb2.SAVE_WEIGHTS and not entry.is_finished
        if not is_save or not self._is_full_for(queue) or self._attempts.is_suspect(entry.work):
            return False
        self._wait_for_slot(queue)
        return True

    def _is_full_for(self, queue: ModelQueue) -> bool:
        """A tenant has one place where another one waits: copies cost few tokens, so that turns alone would let it
        have all of them.
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
        """Copy the adapter, and have the copy written. The model is held until then; see `outcome`.

        None: as many saves are under way as may be, and the model waits for one of them to end.
        """
        if self._is_full_for(queue):
            self._wait_for_slot(queue)
            return None
        copied = self._copy(queue, entry, request, epoch, releases)
        save = self._saves[queue.model_id] = _Save(queue, entry.work)
        self._mark()
        try:
            threading.Thread(target=self._write, args=(save, copied), name="saver", daemon=True).start()
        except RuntimeError:  # there may be no more threads
            del self._saves[queue.model_id]
            self._mark()
            raise
        # Only this thread looks at the queues, so a save that has ended already is not missed.
        self._queues.hold(queue, math.inf)
        return save.written

    def write_alone(
        self, queue: ModelQueue, entry: Entry, request: worker_pb2.SaveWeights, epoch: int, releases: str | None
    ) -> OperationResult:
        """Write a save at which a process has ended in this thread, so that the next end is known to be its own."""
        return self._executor.write(self._copy(queue, entry, request, epoch, releases))

    def _copy(
        self, queue: ModelQueue, entry: Entry, request: worker_pb2.SaveWeights, epoch: int, releases: str | None
    ) -> CopiedSave:
        self._waiting = [waiting for waiting in self._waiting if waiting is not queue]  # also if the copy fails
        copied = self._executor.copy(entry.operation, request, epoch, self._latest(queue.model_id, request))
        return replace(copied, releases=releases)

    def _latest(self, model_id: str, wanted: worker_pb2.SaveWeights) -> int:
        """The event of this model's latest save under the name that this one wants for itself; 0: there is none."""
        if not wanted.name or wanted.overwrite:
            return 0
        self._journal.settle(model_id)  # the save just before may still be on its way to the disk
        return self._journal.read(
            lambda db: result_tables.saved_name_event(db, model_id, wanted.kind, wanted.name)
        ).result()

    def outcome(self, queue: ModelQueue) -> OperationResult | None:
        """Of the save of this model that has been written, once; None: none has. Raises what writing it has."""
        save = self._saves.pop(queue.model_id, None)
        if save is None:
            return None
        self._mark()
        for waiting in self._waiting:
            self._queues.hold(waiting, 0.0)  # each stays on the list until it has its place
        try:
            return save.written.result()
        finally:
            # An error holds the frames that it came through, and they the copy: as a cycle it would stay for long.
            save.written = Future()

    def _write(self, save: _Save, copied: CopiedSave) -> None:
        with fatal_on_error("a save could not be written"):  # what is no Exception, such as a panic of a library's
            try:
                reach("save-before-write")
                save.written.set_result(self._executor.write(copied))
            except Exception as error:
                save.written.set_exception(error)

    def is_written(self, queue: ModelQueue) -> bool:
        """Return whether `outcome` has something for this model."""
        save = self._saves.get(queue.model_id)
        return save is not None and save.written.done()

    def wait(self) -> None:
        """Until nothing is being written, so that what the process ends of next is of one work alone."""
        for save in self._saves.values():
            save.written.exception()
        self._mark()

    def wait_at_stop(self) -> list[ModelQueue]:
        """Return the models whose saves are under way, once all are written. No turns follow."""
        saves = list(self._saves.values())
        for save in saves:
            save.written.exception()
        return [save.queue for save in saves]

    def _mark(self) -> None:
        self._marker.beside("saves", *(save.work for save in self._saves.values() if not save.written.done()))
