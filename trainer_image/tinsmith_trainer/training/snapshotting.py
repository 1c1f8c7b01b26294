"""Snapshots: the times at which a model gets a snapshot, the costs, and the records in the journal.

The engine's thread takes snapshots, because this thread owns the state. Any thread may request a snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFile, SnapshotFolder
from tinsmith_trainer.disk.free_space import MIB, NO_ROOM
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import Draining, JournalFull, SnapshotRefused
from tinsmith_trainer.oplog import result_tables
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.oplog.model_queue import ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.process.in_flight_marker import EngineCall, InFlightWork

log = structlog.get_logger(__name__)

MOST_UNSAVED_OPERATIONS = 5000
"""The maximum number of operations in a replay.

At a start, each operation of the replay is read, and kept in memory until it has run. Without this limit, a replay
could have a very large number of operations, because some operations, such as failed operations, cost almost no time.
"""


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """The limits on the length of a replay.

    A snapshot is due if a replay would take `replay_seconds`, or `times_snapshot_cost` times as long as the snapshot,
    or if the replay would have too many operations.
    """

    replay_seconds: float = 10.0
    times_snapshot_cost: float = 20.0


class Snapshotter:
    """The writer of snapshot files. The journal decides which file is valid."""

    def __init__(
        self,
        engine: Engine,
        folder: SnapshotFolder,
        engine_call: EngineCall,
        attempts: Attempts,
        policy: SnapshotPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.last_time = 0.0
        self._engine = engine
        self._folder = folder
        self._engine_call = engine_call
        self._attempts = attempts
        self._policy = policy
        self._clock = clock
        self._cost_seconds = 0.0

    def if_due(self, queue: ModelQueue, applied: int) -> SnapshotFile | None:
        """Take a snapshot if a snapshot is due. A failure is only logged, because the journal still has the inputs."""
        limit = max(self._policy.replay_seconds, self._policy.times_snapshot_cost * self._cost_seconds)
        if queue.replay_seconds <= limit and queue.unsaved_operations < MOST_UNSAVED_OPERATIONS:
            return None
        try:
            return self._write_unless_deadly(queue, applied)
        except Exception as error:
            log.warning("no snapshot", model_id=queue.model_id, error=str(error) or type(error).__name__)
            return None

    def of_result(self, queue: ModelQueue, work: InFlightWork) -> SnapshotFile:
        """Take the snapshot that must exist before the operation's result becomes visible.

        If this raises JournalFull, the caller must undo the operation. After any other error the process must end.
        """
        return self._write(queue, work.seq_id, work)

    def now(self, queue: ModelQueue, applied: int) -> SnapshotFile:
        """Take a snapshot. Raises JournalFull, SnapshotRefused, or another OSError."""
        return self._write_unless_deadly(queue, applied)

    def is_suspect(self, queue: ModelQueue) -> bool:
        """Return whether a process has ended during an earlier attempt of the model's next snapshot."""
        return self._attempts.is_suspect(_work_of(queue))

    def _write_unless_deadly(self, queue: ModelQueue, applied: int) -> SnapshotFile:
        """Take a snapshot only to make a later replay shorter.

        A snapshot is refused if earlier attempts ended too many processes.
        """
        work = _work_of(queue)
        if (refusal := self._attempts.refusal(work)) is not None:
            raise SnapshotRefused(refusal.message)
        file = self._write(queue, applied, work)
        self._attempts.succeeded(work)
        return file

    def _write(self, queue: ModelQueue, applied: int, work: InFlightWork) -> SnapshotFile:
        if queue.failed_snapshot_bytes and not self._folder.has_room_for(queue.failed_snapshot_bytes):
            raise _no_room(queue)
        started = time.perf_counter()
        with self._engine_call.at(work):
            state = self._engine.state(queue.model_id)
            try:
                file = self._folder.write(Snapshot(queue.model_id, applied, state, queue.window_failure))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                queue.failed_snapshot_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
                raise _no_room(queue) from error
        self._cost_seconds = queue.snapshot_seconds = time.perf_counter() - started
        self.last_time = self._clock()
        queue.rank, queue.optimizer_step = state.lora.rank, state.optimizer_step
        queue.replay_seconds, queue.unsaved_operations, queue.failed_snapshot_bytes = 0.0, 0, 0
        return file


def _work_of(queue: ModelQueue) -> InFlightWork:
    return InFlightWork("snapshot", queue.model_id, queue.snapshot_applied)


def _no_room(queue: ModelQueue) -> JournalFull:
    size = f"{queue.failed_snapshot_bytes / MIB:.1f} MiB"
    return JournalFull(
        f"The volume has no room for a snapshot of {queue.model_id}, which takes {size} "
        "in addition to the reserve: make room there, or end a session. The journal still has all operations."
    )


def _is_saved(queue: ModelQueue) -> bool:
    return not queue.is_open or queue.order.applied <= queue.snapshot_applied


class RequestedSnapshot:
    """A snapshot that was requested and has not begun.

    All threads that request a snapshot share one object. Thread-safe.

    The future returns the time of the snapshot in Unix seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._future: Future[float] | None = None

    def ask(self, arrange: Callable[[], None]) -> Future[float]:
        """Return the future of the snapshot. The first request calls `arrange`, which schedules the snapshot."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                # one caller that gives up must not cancel the snapshot for the others
                self._future.set_running_or_notify_cancel()
                arrange()
            return self._future

    def begin(self) -> Future[float] | None:
        """Begin the snapshot.

        Requests after `begin` start another snapshot. Return None if no thread has requested a snapshot.
        """
        with self._lock:
            future, self._future = self._future, None
            return future


class ModelSnapshots:
    """The snapshots of models, and the saves that make snapshots.

    The journal records a new snapshot before the old snapshot is removed.
    """

    def __init__(
        self,
        snapshotter: Snapshotter,
        queues: ModelQueues,
        journal: Journal,
        folder: SnapshotFolder,
        clock: Callable[[], float],
    ) -> None:
        self._snapshotter = snapshotter
        self._queues = queues
        self._journal = journal
        self._folder = folder
        self._clock = clock
        self._requested = RequestedSnapshot()

    def take_over(self) -> None:
        """Read the snapshots of the previous process."""
        self._snapshotter.last_time = self._folder.newest_written_at()

    @property
    def last_time(self) -> float:
        """The time of the latest snapshot in Unix seconds, or 0 if the worker has no snapshot."""
        return self._snapshotter.last_time

    def soon(self) -> Future[float]:
        """Between two turns, save every model that has changed since the last snapshot of the model. Thread-safe.

        When the snapshots are on disk, the future returns the time of the snapshots. Requests that arrive before the
        snapshots begin share this future. The future fails with JournalFull or SnapshotRefused, or with Draining if the
        worker stops first. A stop takes snapshots of all models, too.
        """
        return self._requested.ask(lambda: self._queues.between_turns(self._take_requested))

    def _take_requested(self) -> None:
        future = self._requested.begin()
        if future is None:
            return
        try:
            self._all_that_changed()
        except Exception as error:
            log.warning("no snapshot, though one was asked for", error=str(error))
            future.set_exception(error)
        else:
            self._snapshotter.last_time = self._clock()  # also if no model had changed, because everything is saved
            future.set_result(self.last_time)

    def _all_that_changed(self) -> None:
        """Save all changed models. Raises the errors of `Snapshotter.now`."""
        failed: Exception | None = None
        for queue in self._queues.open():
            try:
                self._if_changed(queue)
            except (JournalFull, SnapshotRefused) as error:  # the other models are still saved
                failed = error
        if failed is not None:
            raise failed

    def at_stop(self) -> None:
        """Save all models during a stop. The saves during a stop only make the replay at the next start shorter.

        If a process has ended during a model's snapshot, this model comes last. The wait for saves in progress comes
        after the snapshots, because a slow checkpoint root may delay these saves.
        """
        for queue in sorted(self._queues.open(), key=self._snapshotter.is_suspect):
            try:
                self._if_changed(queue)
            except Exception:
                log.exception("no snapshot at the stop", model_id=queue.model_id)
        if (future := self._requested.begin()) is not None:
            future.set_exception(Draining("this worker is shutting down; it saves its adapters on its way"))

    def has_room_for(self, size_bytes: int) -> bool:
        return self._folder.has_room_for(size_bytes)

    def for_result(self, queue: ModelQueue, work: InFlightWork, result: OperationResult) -> SnapshotFile | None:
        """Return the snapshot that the journal records in the transaction of this result.

        Raises the errors of `of_result`.
        """
        if result.releases is not None:
            return None
        if result.forces_snapshot:
            return self._snapshotter.of_result(queue, work)
        return self._snapshotter.if_due(queue, work.seq_id)

    def save_if_changed(self, queue: ModelQueue, before_journal: Callable[[], None]) -> None:
        """Save the model if the model has changed. The snapshot is durable on return.

        Raises the errors of `Snapshotter.now`.
        """
        self._if_changed(queue, before_journal)

    def _if_changed(self, queue: ModelQueue, before_journal: Callable[[], None] = lambda: None) -> None:
        """Save the model if the model has changed. The snapshot is durable on return.

        Raises the errors of `Snapshotter.now`. Raises JournalFull while a result of the model waits for space. The next
        process would run the operation of a waiting result again, so no snapshot may already contain the effect of this
        operation.
        """
        if _is_saved(queue):
            return
        self._journal.settle(queue.model_id)
        if _is_saved(queue):  # saved by a write that was being synced: a release, or a result with a snapshot
            return
        applied = queue.order.applied
        if queue.snapshot is not None and queue.changed_at <= queue.snapshot_applied:
            file = queue.snapshot  # only saves came after this snapshot, so it is also valid for the latest operation
        else:
            file = self._snapshotter.now(queue, applied)
        before_journal()
        self._record(queue, file, applied)
        self.replace(queue, file, applied)

    def _record(self, queue: ModelQueue, file: SnapshotFile, applied: int) -> None:
        """Record the snapshot in the journal. If this raises JournalFull, the old snapshot stays valid."""
        recorded = self._journal.write(
            lambda db: result_tables.record_snapshot(db, queue.model_id, applied, file.name, file.digest),
            uses_reserve=True,
        )
        try:
            recorded.result()
        except JournalFull:
            if file != queue.snapshot:
                self._folder.remove(file.name)
            raise

    def replace(self, queue: ModelQueue, file: SnapshotFile | None, applied: int) -> None:
        """Replace the model's snapshot.

        The journal has already recorded the new snapshot. If `file` is None, the journal has forgotten the model.
        """
        old, queue.snapshot = queue.snapshot, file
        queue.snapshot_applied, queue.snapshot_at = applied, self._clock()
        if old is not None and (file is None or old.name != file.name):
            self._folder.remove(old.name)
