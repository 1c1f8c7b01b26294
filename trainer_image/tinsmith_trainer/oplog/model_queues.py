"""The models of a worker, and the lock that guards the models.

This module accepts operations, closes gaps in sequence numbers, and returns the models that are ready for a turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import Failure
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import CREATES, Operation
from tinsmith_trainer.oplog.model_queue import (
    SETTLED,
    Entry,
    KeptPayloads,
    KnownModels,
    ModelQueue,
    UnknownModel,
    read_queue,
)
from tinsmith_trainer.oplog.ordering import Turn
from tinsmith_trainer.oplog.plain_calls import record_positions
from tinsmith_trainer.process.exit import fatal_callback
from tinsmith_trainer.process.failpoints import reach

log = structlog.get_logger(__name__)

GAP_CLOSES_AFTER_SECONDS = 400.0
"""The time after which a gap is closed.

The SDK repeats a submission for 300 s, so an operation that is missing after this time will not arrive.
"""

RECOVERED_AT_ONCE = 250

OnFinished = Callable[[str, int], None]
MaintenanceTask = Callable[[], None]
Ready = tuple[ModelQueue, Turn, Entry]


class Room(Protocol):
    """The memory for the adapters of models that have an operation ready to run."""

    def among(self, ready: Sequence[Ready]) -> tuple[Sequence[Ready], float]:
        """Return the models with room in memory, and the seconds until another model may have room.

        The number of seconds is infinite if no model can get room without another change.
        """


class ModelQueues:
    """The models of a worker. Thread-safe.

    The journal calls back in the order of commits, and each queue keeps this order.
    """

    def __init__(
        self, journal: Journal, places: int, on_finished: OnFinished, clock: Callable[[], float] = time.time
    ) -> None:
        self._journal = journal
        self._places = places
        self._on_finished = on_finished
        self._clock = clock
        self._changed = threading.Condition()
        self._models = KnownModels()
        self._maintenance_tasks: deque[MaintenanceTask] = deque()
        self._stopping = False
        self._kept = KeptPayloads()

    # ---- start and stop

    def recover(self) -> list[ModelQueue]:
        """Restore all models and operations from the journal."""
        models = self._journal.read(journal_tables.read_models).result()
        for some in journal_tables.in_batches(models, RECOVERED_AT_ONCE):
            for queue in self._journal.read(partial(self._recovered, models=some)).result():
                with self._changed:
                    self._models.add(queue)
                for entry in queue.stranded():
                    self._write_late(queue, entry, queue.closed_failure())
        return self.all()

    def _recovered(
        self, db: journal_tables.Database, models: Iterable[journal_tables.StoredModel]
    ) -> Sequence[ModelQueue]:
        return [read_queue(db, model, self._clock()) for model in models]

    def stop(self) -> None:
        """Make `wait_for_turns` return None from now on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    # ---- looking

    def all(self) -> list[ModelQueue]:
        with self._changed:
            return list(self._models.all.values())

    def open(self) -> list[ModelQueue]:
        with self._changed:
            return list(self._models.open.values())

    def unreleased(self) -> list[ModelQueue]:
        """Return the models that are open or corrupted."""
        with self._changed:
            return [*self._models.open.values(), *self._models.corrupted.values()]

    def find(self, model_id: str) -> ModelQueue | None:
        with self._changed:
            return self._models.find(model_id)

    def position_of(self, model_id: str, seq_id: int) -> int:
        """Return the position of the operation that a client knows by this number."""
        with self._changed:
            queue = self._models.find(model_id)
            return seq_id if queue is None else queue.plain.positions.position_of(seq_id)

    def is_finished(self, model_id: str, position: int) -> bool | None:
        """Return whether clients may see the result, or None if no operation at this position was accepted."""
        with self._changed:
            queue = self._models.find(model_id)
            return None if queue is None else queue.is_finished(position)

    def is_known(self, request: worker_pb2.SubmitRequest) -> bool:
        """Return whether the operation is already accepted."""
        with self._changed:
            queue = self._models.find(request.model_id)
            if queue is None:
                return False
            if request.idempotency_key:
                return queue.plain.find(request.idempotency_key) is not None
            return queue.is_finished(queue.plain.positions.position_of(request.seq_id)) is not None

    def backlog(self, model_id: str) -> int:
        with self._changed:
            return 0 if (queue := self._models.find(model_id)) is None else queue.order.waiting_count

    def is_next_missing(self, model_id: str, seq_id: int) -> bool:
        """Return whether the model waits for the operation with this number next."""
        with self._changed:
            queue = self._models.find(model_id)
            return queue is not None and queue.order.missing()[:1] == range(seq_id, seq_id + 1)

    def waiting_bytes(self, owner: str) -> int:
        """Return the total size of bodies of one owner's operations that have no result yet."""
        with self._changed:
            return sum(queue.waiting_bytes for queue in self._models.open.values() if queue.owner == owner)

    # ---- accepting

    def accept(self, operation: Operation, payload: bytes, tenant: str = "") -> tuple[int, Future[None]]:
        """Accept an operation. Return the operation's number, and a future that resolves when the operation is on disk.

        A repeated number or key returns the same number and future. A model belongs to the tenant of the model's first
        operation that names a tenant. Raises UnknownModel. If the future fails with JournalFull, the operation was not
        accepted.
        """
        with self._changed:
            queue = self._queue_for(operation)
            queue.tenant = queue.tenant or tenant
            operation = queue.placed(operation)
            seq_id = queue.plain.positions.seq_id_of(operation.seq_id)
            known = queue.entries.get(operation.seq_id)
            if known is not None:
                return seq_id, known.accepted
            if operation.seq_id in queue.settled:
                return seq_id, SETTLED
            # The decision and the write are one step, so that the journal has the order of the decisions.
            late = queue.late_failure(operation.seq_id)
            plain = queue.plain.to_record_with(operation.seq_id)
            accepted = self._write_accepted(queue.tenant, operation, payload, late, plain)
            entry = Entry(operation, "pending", accepted=accepted, body_bytes=len(payload))
            self._kept.keep(entry, payload)
            queue.add(entry)
        add = partial(self._add_accepted, queue, entry, late, plain)
        accepted.add_done_callback(fatal_callback("an operation could not be placed", add))
        return seq_id, accepted

    def take_payload(self, entry: Entry) -> bytes:
        """Return the payload, and remove the payload from memory."""
        operation = entry.operation
        with self._changed:
            kept = self._kept.take(entry)
        if kept is not None:
            return kept
        return self._journal.read(
            lambda db: journal_tables.read_payload(db, operation.model_id, operation.seq_id)
        ).result()

    def _queue_for(self, operation: Operation) -> ModelQueue:
        queue = self._models.find(operation.model_id)
        if queue is None:
            if operation.kind not in CREATES:
                raise UnknownModel(operation.model_id)
            queue = ModelQueue(operation.model_id, "creating")
            self._models.add(queue)
        return queue

    def _write_accepted(
        self, tenant: str, operation: Operation, payload: bytes, late: Failure | None, plain: Sequence[int]
    ) -> Future[None]:
        def write(db: journal_tables.Database) -> None:
            if operation.kind in CREATES:
                journal_tables.insert_model(db, operation.model_id, tenant)
            journal_tables.insert_operation(db, operation, payload, late, self._clock())
            record_positions(db, operation.model_id, plain)
            reach("accept-before-sync")

        return self._journal.write(write, uses_reserve=operation.kind == worker_pb2.RELEASE_MODEL)

    def _add_accepted(
        self, queue: ModelQueue, entry: Entry, late: Failure | None, plain: Sequence[int], done: Future[None]
    ) -> None:
        """Queue the operation. Runs in the journal's thread, in the order of commits."""
        operation = entry.operation
        reach("accept-after-sync")
        if done.exception() is not None:
            self._forget(queue, entry)
            return
        with self._changed:
            entry.accepted = SETTLED
            queue.plain.note_recorded(plain)
            # While this write was being synced, a later operation may have closed the gap that this operation would
            # fill.
            became_late = None if late else queue.late_failure(operation.seq_id)
            if late is not None:
                self._settle_late(queue, entry)
            elif became_late is None:
                queue.put_in_order(operation)
            self._changed.notify_all()
        if late is not None:
            self._on_finished(operation.model_id, operation.seq_id)
        elif became_late is not None:
            self._write_late(queue, entry, became_late)

    def forget(self, model_ids: Iterable[str]) -> list[ModelQueue]:
        """Remove models after the deletion of the models' rows, and return the queues of the models."""
        with self._changed:
            return self._models.remove(model_ids)

    def forget_keys(self, closed_before: float) -> None:
        """See `KnownModels.forget_keys`."""
        with self._changed:
            self._models.forget_keys(closed_before)

    def _forget(self, queue: ModelQueue, entry: Entry) -> None:
        with self._changed:
            self._kept.take(entry)
            queue.remove(entry)
            queue.take_back(entry.operation)
            if not queue.entries and not queue.settled:
                self._models.remove([queue.model_id])

    # ---- turns

    def wait_for_turns(self, room: Room) -> Sequence[Ready] | MaintenanceTask | None:
        """Wait until a model can run. Return all models that can run, each with the next operation.

        If a maintenance task waits, return the task instead. After `stop`, return None.

        Models without room in memory are left out until the memory has room. Tasks have precedence. The caller chooses
        one model for the turn.
        """
        with self._changed:
            while not self._stopping:
                if self._maintenance_tasks:
                    return self._maintenance_tasks.popleft()
                ready, seconds = room.among(self._ready())
                if ready:
                    return ready
                seconds = min(self._seconds_to_next_hold(), seconds)
                self._changed.wait(None if math.isinf(seconds) else seconds)
        return None

    def between_turns(self, task: MaintenanceTask) -> None:
        """Run the task before the next operation, unless the scheduler stops first."""
        with self._changed:
            self._maintenance_tasks.append(task)
            self._changed.notify_all()

    def _seconds_to_next_hold(self) -> float:
        """Return the seconds until the next held queue may run.

        If no queue is held, the number is infinite.
        """
        held = (queue.held_until for queue in self._models.open.values() if queue.held_until)
        return max(min(held, default=math.inf) - time.monotonic(), 0.0)

    def hold(self, queue: ModelQueue, seconds: float, because: str = "") -> None:
        """Hold the model: its next operation is tried again after this time."""
        with self._changed:
            queue.held_until = time.monotonic() + seconds
            queue.held_because = because

    def quarantine(self, queue: ModelQueue, reason: str) -> None:
        """Stop running the model in this process. The operations of the model do not fail."""
        log.error("model quarantined", model_id=queue.model_id, reason=reason)
        with self._changed:
            queue.quarantined = reason

    def _ready(self) -> list[Ready]:
        has_a_place_free = self._has_a_place_free()
        return [
            (queue, turn, queue.entries[turn.seq_id])
            for queue in self._models.open.values()
            if self._may_run(queue)
            and (queue.has_adapter or has_a_place_free)
            and (turn := queue.order.next_turn()) is not None
        ]

    def _may_run(self, queue: ModelQueue) -> bool:
        if queue.held_until <= time.monotonic():
            queue.held_until = 0.0  # also if it then waits for a slot, because a slot needs no wake-up
        create_failed = bool(queue.reason)  # clients do not know this yet; later operations fail when clients know
        return queue.is_open and not create_failed and not queue.quarantined and not queue.held_until

    def _has_a_place_free(self) -> bool:
        """Return whether the operation that creates a model can run.

        If all places are taken, the operation waits until another model is released.
        """
        return sum(queue.has_adapter for queue in self._models.open.values()) < self._places

    def waits_for_a_place(self, model_id: str) -> bool:
        with self._changed:
            queue = self._models.find(model_id)
            if queue is None or not queue.is_open or queue.has_adapter:
                return False
            return not self._has_a_place_free()

    def finish(self, queue: ModelQueue, turn: Turn) -> None:
        """Note that the operation has had an effect, in the first run or in a replay."""
        with self._changed:
            queue.order.finish(turn)
            queue.unsaved_operations += 1
            entry = queue.entries.get(turn.seq_id)
            if entry is not None and entry.is_finished:
                queue.settle(entry)

    def publish(self, queue: ModelQueue, entry: Entry, failure: Failure | None) -> None:
        """Make a result visible to clients after the result is on disk."""
        with self._changed:
            self._kept.take(entry)  # the operation may have failed before its payload was read
            entry.status = "done" if failure is None else "failed"
            queue.settle(entry)
            if queue.phase == "creating" and entry.operation.kind in CREATES:
                if failure is None:
                    queue.phase = "live"
                else:
                    self._models.close(queue, "released", queue.reason)
            self._changed.notify_all()
        if not queue.is_open:
            self._fail_waiting(queue)
        self._on_finished(queue.model_id, entry.operation.seq_id)

    # ---- what will not run

    def close_model(self, queue: ModelQueue, phase: journal_tables.ModelPhase, reason: str = "") -> None:
        """Close the model. Waiting operations fail with the reason."""
        with self._changed:
            self._models.close(queue, phase, reason)
            self._changed.notify_all()  # the model's slot is free
        self._fail_waiting(queue)

    def _fail_waiting(self, queue: ModelQueue) -> None:
        failure = queue.closed_failure()
        with self._changed:
            waiting = [entry for entry in queue.entries.values() if entry.status == "pending" and entry.accepted.done()]
        for entry in waiting:
            self._write_late(queue, entry, failure)

    def _write_late(self, queue: ModelQueue, entry: Entry, failure: Failure) -> None:
        operation = entry.operation

        def write(db: journal_tables.Database) -> None:
            journal_tables.record_late(db, operation.model_id, operation.seq_id, failure, self._clock())

        def publish(_: Future[None]) -> None:
            with self._changed:
                self._settle_late(queue, entry)
            self._on_finished(operation.model_id, operation.seq_id)

        written = self._journal.write(write, must_succeed=True, model_id=operation.model_id)
        written.add_done_callback(fatal_callback("a failure could not be published", publish))

    def _settle_late(self, queue: ModelQueue, entry: Entry) -> None:
        self._kept.take(entry)
        entry.status = "late"
        queue.settle(entry)

    # ---- gaps

    def age_gaps(self, seconds: float) -> None:
        """Count the time in which clients could fill open gaps, and close the gaps that have been open for too long."""
        for queue in self.open():
            with self._changed:
                overdue = self._overdue_gap(queue, seconds)
            if overdue is not None:
                self._close_gap(queue, overdue)

    def _overdue_gap(self, queue: ModelQueue, seconds: float) -> int | None:
        gap_at = queue.order.open_gap()
        if gap_at is None or gap_at != queue.gap_at:
            queue.gap_at, queue.gap_open_seconds, queue.gap_is_closing = gap_at, 0.0, False
            return None
        queue.gap_open_seconds += seconds
        stays = queue.gap_is_closing or any(not entry.accepted.done() for entry in queue.entries.values())
        return gap_at if queue.gap_open_seconds >= GAP_CLOSES_AFTER_SECONDS and not stays else None

    def _close_gap(self, queue: ModelQueue, below: int) -> None:
        queue.gap_is_closing = True

        def take_effect(_: Future[None]) -> None:
            with self._changed:
                queue.order.close_below(below)
                self._changed.notify_all()

        close = partial(journal_tables.raise_closed_below, model_id=queue.model_id, seq_id=below)
        written = self._journal.write(close, must_succeed=True, model_id=queue.model_id)
        written.add_done_callback(fatal_callback("a gap could not be closed", take_effect))
