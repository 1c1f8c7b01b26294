"""All models of a worker and the one lock around them: accepting operations, closing gaps, whose turn it is."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from tinsmith_rpc import worker_pb2

from tinsmith_trainer import operations as rows
from tinsmith_trainer.failpoints import reach
from tinsmith_trainer.journal import Journal
from tinsmith_trainer.model_line import SETTLED, Entry, ModelLine
from tinsmith_trainer.operations import Failure, Operation
from tinsmith_trainer.ordering import Turn

GAP_CLOSES_AFTER_SECONDS = 400.0
"""The SDK retries a submit for 300 s; a number that is still missing then will not come."""

KEPT_PAYLOAD_BYTES = 128 * 1024**2
"""Payloads of waiting operations in memory; above this the engine reads them from the journal."""

CREATES = (worker_pb2.CREATE_MODEL, worker_pb2.LOAD_MODEL)

OnFinished = Callable[[str, int], None]
Errand = Callable[[], None]
Ready = tuple[ModelLine, Turn, Entry]


class UnknownModel(LookupError):
    """No such model here, and the operation does not create it."""


class Lines:
    """Thread-safe. Callbacks of the journal keep the order of commits, and so does the order of a line."""

    def __init__(
        self, journal: Journal, adapter_slots: int, on_finished: OnFinished, clock: Callable[[], float] = time.time
    ) -> None:
        self._journal = journal
        self._adapter_slots = adapter_slots
        self._on_finished = on_finished
        self._clock = clock
        self._changed = threading.Condition()
        self._lines: dict[str, ModelLine] = {}
        self._queue: deque[str] = deque()  # models in the order of their turns
        self._errands: deque[Errand] = deque()
        self._stopping = False
        self._kept_bytes = 0

    # ---- start and stop

    def recover(self) -> list[ModelLine]:
        """Everything the journal holds, in place again."""
        models = self._journal.read(rows.read_models).result()
        for model in models:
            line = ModelLine.recovered(model, self._stored_operations(model.model_id), self._clock())
            with self._changed:
                self._enlist(line)
            for entry in line.unplaced():
                self._write_late(line, entry, line.closed_failure())
        return self.all()

    def _stored_operations(self, model_id: str) -> list[rows.StoredOperation]:
        return self._journal.read(lambda db: rows.read_operations(db, model_id)).result()

    def stop(self) -> None:
        """`wait_for_turn` returns None from now on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    # ---- looking

    def all(self) -> list[ModelLine]:
        with self._changed:
            return list(self._lines.values())

    def find(self, model_id: str) -> ModelLine | None:
        with self._changed:
            return self._lines.get(model_id)

    def entry(self, model_id: str, seq_id: int) -> Entry | None:
        with self._changed:
            line = self._lines.get(model_id)
            return None if line is None else line.entries.get(seq_id)

    def backlog(self, model_id: str) -> int:
        with self._changed:
            line = self._lines.get(model_id)
            return 0 if line is None else line.order.waiting_count

    # ---- accepting

    def accept(self, operation: Operation, payload: bytes) -> Future[None]:
        """Resolves when the operation is on disk; again for the same number: the same future.

        Raises UnknownModel. The future fails with JournalFull, and then nothing was accepted.
        """
        with self._changed:
            line = self._line_for(operation)
            known = line.entries.get(operation.seq_id)
            if known is not None:
                return known.accepted
            # Decision and enqueueing are one step: the journal keeps the order in which we decided.
            late = line.late_failure(operation.seq_id)
            entry = Entry(operation, "pending", accepted=self._write_accepted(operation, payload, late))
            if self._kept_bytes + len(payload) <= KEPT_PAYLOAD_BYTES:
                entry.payload = payload
                self._kept_bytes += len(payload)
            line.entries[operation.seq_id] = entry
        entry.accepted.add_done_callback(lambda done: self._place(line, entry, late, done))
        return entry.accepted

    def take_payload(self, entry: Entry) -> bytes:
        """What was submitted; memory keeps it no longer."""
        operation = entry.operation
        with self._changed:
            kept = self._drop_payload(entry)
        if kept is not None:
            return kept
        return self._journal.read(lambda db: rows.read_payload(db, operation.model_id, operation.seq_id)).result()

    def _drop_payload(self, entry: Entry) -> bytes | None:
        kept, entry.payload = entry.payload, None
        self._kept_bytes -= len(kept or b"")
        return kept

    def _line_for(self, operation: Operation) -> ModelLine:
        line = self._lines.get(operation.model_id)
        if line is None:
            if operation.kind not in CREATES:
                raise UnknownModel(operation.model_id)
            line = ModelLine(operation.model_id, "creating")
            self._enlist(line)
        return line

    def _enlist(self, line: ModelLine) -> None:
        self._lines[line.model_id] = line
        if line.is_open:
            self._queue.append(line.model_id)

    def _write_accepted(self, operation: Operation, payload: bytes, late: Failure | None) -> Future[None]:
        def write(db: rows.Database) -> None:
            if operation.kind in CREATES:
                rows.insert_model(db, operation.model_id)
            rows.insert_operation(db, operation, payload, late, self._clock())
            reach("accept-before-sync")

        return self._journal.write(write)

    def _place(self, line: ModelLine, entry: Entry, late: Failure | None, done: Future[None]) -> None:
        """In the journal's thread, in the order of commits."""
        operation = entry.operation
        reach("accept-after-sync")
        if done.exception() is not None:
            self._forget(line, entry)
            return
        with self._changed:
            entry.accepted = SETTLED
            # While this was being synced, a later operation may have closed the gap that it would fill.
            became_late = None if late else line.late_failure(operation.seq_id)
            if late is not None:
                self._drop_payload(entry)
                entry.status, entry.failure = "late", late
            elif became_late is None:
                line.put_in_order(operation)
            self._changed.notify_all()
        if late is not None:
            self._on_finished(operation.model_id, operation.seq_id)
        elif became_late is not None:
            self._write_late(line, entry, became_late)

    def forget(self, model_ids: Iterable[str]) -> None:
        """Models whose rows are gone."""
        with self._changed:
            for model_id in model_ids:
                del self._lines[model_id]

    def _forget(self, line: ModelLine, entry: Entry) -> None:
        with self._changed:
            self._drop_payload(entry)
            del line.entries[entry.operation.seq_id]
            if not line.entries:
                del self._lines[line.model_id]
                self._queue.remove(line.model_id)

    # ---- turns

    def wait_for_turn(self) -> Ready | Errand | None:
        """Models take turns; within one, its order decides; errands go first. None: stop."""
        with self._changed:
            while not self._stopping:
                if self._errands:
                    return self._errands.popleft()
                ready = self._next_ready()
                if ready is not None:
                    return ready
                self._changed.wait(self._seconds_to_next_hold())
        return None

    def between_turns(self, errand: Errand) -> None:
        """Whoever waits for turns gets this before the next one; never, if told to stop first."""
        with self._changed:
            self._errands.append(errand)
            self._changed.notify_all()

    def _seconds_to_next_hold(self) -> float | None:
        """When a line that was put off is due again; None: only a change can bring work."""
        held = [line.held_until for line in self._lines.values() if line.is_open and line.held_until]
        return max(min(held) - time.monotonic(), 0.0) if held else None

    def hold(self, line: ModelLine, seconds: float) -> None:
        """Its next operation is tried again after this time."""
        with self._changed:
            line.held_until = time.monotonic() + seconds

    def set_aside(self, line: ModelLine, reason: str) -> None:
        """Nothing of it runs in this process any more, and nothing of it fails."""
        with self._changed:
            line.set_aside = reason

    def _next_ready(self) -> Ready | None:
        for _ in range(len(self._queue)):
            line = self._lines[self._queue[0]]
            self._queue.rotate(-1)
            turn = line.order.next_turn() if self._may_run(line) else None
            if turn is not None and not self._needs_a_slot(line):
                return line, turn, line.entries[turn.seq_id]
        return None

    def _may_run(self, line: ModelLine) -> bool:
        if line.held_until <= time.monotonic():
            line.held_until = 0.0  # also where it waits for a slot next: nobody is to wake for it
        create_failed = bool(line.reason)  # clients do not know yet; what is behind it fails when they do
        return line.is_open and not create_failed and not line.set_aside and not line.held_until

    def _needs_a_slot(self, line: ModelLine) -> bool:
        """A create waits, rather than fails, until another model is released."""
        if line.has_adapter:
            return False
        return sum(other.holds_a_slot for other in self._lines.values()) >= self._adapter_slots

    def waits_for_a_slot(self, model_id: str) -> bool:
        with self._changed:
            line = self._lines.get(model_id)
            return line is not None and line.is_open and self._needs_a_slot(line)

    def finish(self, line: ModelLine, turn: Turn) -> None:
        with self._changed:
            line.order.finish(turn)

    def publish(self, line: ModelLine, entry: Entry, failure: Failure | None) -> None:
        """The outcome is on disk: clients may know."""
        with self._changed:
            entry.status = "done" if failure is None else "failed"
            entry.failure = failure
            if line.phase == "creating" and entry.operation.kind in CREATES:
                if failure is None:
                    line.phase = "live"
                else:
                    self._close(line, "released", line.reason)
            self._changed.notify_all()
        if not line.is_open:
            self._fail_waiting(line)
        self._on_finished(line.model_id, entry.operation.seq_id)

    # ---- what will not run

    def close_model(self, line: ModelLine, phase: rows.ModelPhase, reason: str = "") -> None:
        """Nothing of this model runs any more; what waits fails with the reason."""
        with self._changed:
            self._close(line, phase, reason)
            self._changed.notify_all()  # its slot is free
        self._fail_waiting(line)

    def _close(self, line: ModelLine, phase: rows.ModelPhase, reason: str) -> None:
        line.phase, line.reason = phase, reason
        if line.model_id in self._queue:
            self._queue.remove(line.model_id)

    def _fail_waiting(self, line: ModelLine) -> None:
        failure = line.closed_failure()
        with self._changed:
            waiting = [entry for entry in line.entries.values() if entry.status == "pending" and entry.accepted.done()]
        for entry in waiting:
            self._write_late(line, entry, failure)

    def _write_late(self, line: ModelLine, entry: Entry, failure: Failure) -> None:
        operation = entry.operation

        def write(db: rows.Database) -> None:
            rows.record_late(db, operation.model_id, operation.seq_id, failure, self._clock())

        def publish(_: Future[None]) -> None:
            with self._changed:
                self._drop_payload(entry)
                entry.status, entry.failure = "late", failure
            self._on_finished(operation.model_id, operation.seq_id)

        self._journal.write(write, must_succeed=True).add_done_callback(publish)

    # ---- gaps

    def age_gaps(self, seconds: float) -> None:
        """Notes that this much time passed in which clients could have filled open gaps; closes the overdue."""
        for line in self.all():
            with self._changed:
                overdue = self._overdue_gap(line, seconds)
            if overdue is not None:
                self._close_gap(line, overdue)

    def _overdue_gap(self, line: ModelLine, seconds: float) -> int | None:
        gap_at = line.order.open_gap() if line.is_open else None
        if gap_at is None or gap_at != line.gap_at:
            line.gap_at, line.gap_open_seconds = gap_at, 0.0
            return None
        line.gap_open_seconds += seconds
        being_accepted = any(not entry.accepted.done() for entry in line.entries.values())
        return gap_at if line.gap_open_seconds >= GAP_CLOSES_AFTER_SECONDS and not being_accepted else None

    def _close_gap(self, line: ModelLine, below: int) -> None:
        def take_effect(_: Future[None]) -> None:
            with self._changed:
                line.order.close_below(below)
                self._changed.notify_all()

        written = self._journal.write(lambda db: rows.raise_closed_below(db, line.model_id, below), must_succeed=True)
        written.add_done_callback(take_effect)
