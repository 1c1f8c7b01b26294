"""The state of one model in the scheduler: operations and their order, accumulated calls, and the snapshot."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from tinsmith_rpc import PLAIN_SEQ_IDS, RELEASE_SEQ_ID

from tinsmith_trainer.checkpoints.snapshots import SnapshotFile
from tinsmith_trainer.errors import Failure
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal_tables import ModelPhase, Operation, Status, StoredModel, StoredOperation
from tinsmith_trainer.oplog.ordering import NumberRanges, OperationOrder
from tinsmith_trainer.oplog.plain_calls import PlainCalls, read_plain_calls
from tinsmith_trainer.process.in_flight_marker import InFlightWork, Purpose

SETTLED: Future[None] = Future()
"""A future that is shared by all entries with operations on disk.

A separate future would take most of an entry's memory.
"""
SETTLED.set_result(None)


KEPT_PAYLOAD_BYTES = 128 * 1024**2
"""The limit on payloads of waiting operations in memory. Payloads beyond this limit are read from the journal."""


@dataclass(slots=True)
class Entry:
    """An accepted operation. `status` is visible to clients, so the status changes only after the commit."""

    operation: Operation
    status: Status
    failure: Failure | None = None
    accepted: Future[None] = SETTLED  # resolves when the operation is on disk
    payload: bytes | None = None  # kept until the turn, so that the engine need not wait for the journal's thread
    body_bytes: int = 0  # on disk; only of operations that this process has accepted
    started_at: float | None = None  # Unix seconds of the first turn in this process
    # from the journal, or from the body; None: the body was not read, or cannot be read
    forward_only: bool | None = None

    @property
    def is_finished(self) -> bool:
        return self.status != "pending"

    @property
    def may_bear_a_gradient(self) -> bool:
        """Return whether the next optimizer step may depend on the operation.

        If the body was not read, the operation may have added a gradient.
        """
        return self.operation.is_forward_backward and not self.forward_only

    @property
    def work(self) -> InFlightWork:
        """The piece of work that a turn of the operation does, for the in-flight marker."""
        purpose: Purpose = "replay" if self.is_finished else "operation"
        return InFlightWork(purpose, self.operation.model_id, self.operation.seq_id)


class KeptPayloads:
    """The payloads of waiting operations in memory.

    The engine need not read these payloads from the journal.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def keep(self, entry: Entry, payload: bytes) -> None:
        if self._bytes + len(payload) <= KEPT_PAYLOAD_BYTES:
            entry.payload = payload
            self._bytes += len(payload)

    def take(self, entry: Entry) -> bytes | None:
        """Remove and return the payload, or return None if the payload is not in memory."""
        kept, entry.payload = entry.payload, None
        self._bytes -= len(kept or b"")
        return kept


class UnknownModel(LookupError):
    """An error for an operation on an unknown model, if the operation does not create the model."""


@dataclass(slots=True)
class ModelQueue:
    """The state of one model.

    Guarded by the lock of `ModelQueues`, except for the fields that only the engine's thread uses.
    """

    model_id: str
    phase: ModelPhase
    reason: str = ""
    tenant: str = ""  # empty: unknown
    order: OperationOrder = field(default_factory=OperationOrder)
    # operations without a result, and operations that must run again
    entries: dict[int, Entry] = field(default_factory=dict)
    # all other operations, whose results are only in the journal
    settled: NumberRanges = field(default_factory=NumberRanges)
    plain: PlainCalls = field(default_factory=PlainCalls)
    waiting_bytes: int = 0  # the bodies of operations without a result
    last_accepted_at: float = 0.0  # Unix seconds; 0: unknown
    snapshot: SnapshotFile | None = None
    snapshot_applied: int = -1
    snapshot_at: float = 0.0
    gap_at: int | None = None  # the operation that waits for an open gap
    gap_open_seconds: float = 0.0
    gap_is_closing: bool = False  # the write that closes the gap may wait for space
    held_until: float = 0.0  # no operation runs until this time on the monotonic clock; 0: not held
    held_because: str = ""  # the reason for clients while it is held
    damage_seen_by: str | None = None  # the process that could not read the snapshot; None: no process
    quarantined: str = ""  # why no operation runs until the worker restarts; the model keeps its slot
    # Only the engine's thread uses these fields:
    window_failure: Failure | None = None
    changed_at: int = -1  # the last operation that ran here and changed the state in a snapshot
    replay_seconds: float = 0.0  # the time of a replay if the process ended now
    unsaved_operations: int = 0  # counted since the snapshot; a start reads each of them
    # the time of the latest snapshot; before the first one, the time in which the old snapshot was read
    snapshot_seconds: float = 0.0
    failed_snapshot_bytes: int = 0  # the size of the snapshot that found no space; 0: the latest snapshot found space
    retried_since: float | None = None  # the time of the next operation's first retry
    undone_seconds: float = 0.0  # how long the next operation was held after it was last undone; 0: it was not undone
    optimizer_step: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        self.order.plain = self.plain.positions

    @classmethod
    def recovered(
        cls,
        model: StoredModel,
        unsettled: list[StoredOperation],
        settled: NumberRanges,
        plain: PlainCalls,
        now: float,
    ) -> ModelQueue:
        """Return the queue in the state that the journal records.

        All operations after the snapshot are queued again.
        """
        queue = cls(model.model_id, model.phase, model.reason, model.tenant or "")
        queue.damage_seen_by = model.damage_seen_by
        queue.order = OperationOrder(model.applied, model.closed_below, plain.positions)
        queue.snapshot_applied = model.applied
        queue.snapshot_at = now
        queue.settled, queue.plain = settled, plain
        if model.snapshot_file is not None and model.snapshot_digest is not None:
            queue.snapshot = SnapshotFile(model.snapshot_file, model.snapshot_digest)
        for stored in unsettled:
            queue._add_stored(stored)
        return queue

    def _add_stored(self, stored: StoredOperation) -> None:
        operation = stored.operation
        self.entries[operation.seq_id] = Entry(
            operation, stored.status, stored.failure, forward_only=operation.forward_only
        )
        if operation.seq_id > self.snapshot_applied and self.is_open:
            self.put_in_order(operation)

    def placed(self, operation: Operation) -> Operation:
        """Return the operation at its position. A new plain call takes the position after all accepted operations."""
        key = operation.idempotency_key
        if not key:
            return replace(operation, seq_id=self.plain.positions.position_of(operation.seq_id))
        position = self.plain.find(key)
        if position is None:
            position = self._highest() + 1
            self.plain.place(key, position)
        return replace(operation, seq_id=position)

    def take_back(self, operation: Operation) -> None:
        """Free the position of a plain call that was not accepted. The operation is not among the entries any more."""
        if operation.idempotency_key:
            is_highest = self._highest(besides=operation.seq_id) < operation.seq_id
            self.plain.take_back(operation.idempotency_key, operation.seq_id, is_highest=is_highest)

    def _highest(self, besides: int | None = None) -> int:
        """Return the highest position that an operation has. The creation has position 0."""
        ends = (last for _, last in self.settled)
        used = (*self.entries, *ends, self.order.applied, self.plain.positions.last)
        return max(0, *(each for each in used if each not in (RELEASE_SEQ_ID, besides)))

    def known_as(self, operation: Operation) -> str:
        """Return how clients know the operation, for messages: by its number, or as one without a number."""
        seq_id = self.plain.positions.seq_id_of(operation.seq_id)
        return "without a number" if PLAIN_SEQ_IDS < seq_id < RELEASE_SEQ_ID else str(seq_id)

    def add(self, entry: Entry) -> None:
        self.entries[entry.operation.seq_id] = entry
        self.waiting_bytes += entry.body_bytes
        self.last_accepted_at = max(self.last_accepted_at, entry.operation.accepted_at)

    def settle(self, entry: Entry) -> None:
        """Drop an operation, but keep the number. The result must be on disk, and the effect must have happened."""
        self.remove(entry)
        self.settled.add(entry.operation.seq_id)

    def remove(self, entry: Entry) -> None:
        if self.entries.pop(entry.operation.seq_id, None) is not None:
            self.waiting_bytes -= entry.body_bytes

    def is_finished(self, seq_id: int) -> bool | None:
        """Return whether clients may see the result, or None if no operation at this position was accepted."""
        entry = self.entries.get(seq_id)
        if entry is not None:
            return entry.is_finished
        return True if seq_id in self.settled else None

    def put_in_order(self, operation: Operation) -> None:
        """Queue an operation in the order of positions, after the operation's commit."""
        self.order.accept(operation.seq_id, is_forward_backward=operation.is_forward_backward)

    @property
    def is_open(self) -> bool:
        return self.phase in ("creating", "live")

    @property
    def owner(self) -> str:
        """The tenant whose fair share pays for the model's turns.

        If the tenant is unknown, the model itself is the owner.
        """
        return self.tenant or self.model_id

    @property
    def has_adapter(self) -> bool:
        """Return whether the operation that creates the model has run."""
        return self.order.applied >= 0

    @property
    def holds_a_place(self) -> bool:
        return self.is_open and self.has_adapter

    def stranded(self) -> list[Entry]:
        """Return accepted operations that can never run.

        The previous process crashed before these operations could fail as late.
        """
        return [
            entry
            for entry in self.entries.values()
            if entry.status == "pending" and (entry.operation.seq_id <= self.snapshot_applied or not self.is_open)
        ]

    def closed_failure(self) -> Failure:
        """Return the failure for operations that arrive after the end of the model."""
        if self.phase == "corrupted":
            return Failure("server", f"{self.model_id} is corrupted: {self.reason}. Resume from its last checkpoint.")
        return Failure("user", self.reason or f"{self.model_id} was released when its session ended.")

    def late_failure(self, seq_id: int) -> Failure | None:
        """Return the reason why a new operation at this position will not run, or None if the operation will run."""
        if not self.is_open:
            return self.closed_failure()
        if self.order.is_late(seq_id):
            return Failure(
                "user",
                f"operation {self.plain.positions.seq_id_of(seq_id)} of {self.model_id} came too late: later "
                "operations ran without it. "
                "It was not run.",
            )
        return None

    def oldest_waiting_at(self) -> float | None:
        waiting = (self.entries.get(seq_id) for seq_id in self.order.waiting())
        return min((entry.operation.accepted_at for entry in waiting if entry is not None), default=None)


def read_queue(db: journal_tables.Database, model: StoredModel, now: float) -> ModelQueue:
    """Return the queue of a model in the state that the journal records. Runs in the journal's thread."""
    unsettled, settled = journal_tables.read_unsettled(db, model), journal_tables.read_settled(db, model)
    queue = ModelQueue.recovered(model, unsettled, settled, read_plain_calls(db, model), now)
    if model.is_open:
        queue.last_accepted_at = journal_tables.last_accepted_at(db, model.model_id)
    return queue


class KnownModels:
    """The models of a worker, grouped by phase. Guarded by the lock of `ModelQueues`.

    Most models are closed, and frequent tasks skip closed models.
    """

    def __init__(self) -> None:
        self.all: dict[str, ModelQueue] = {}
        self.open: dict[str, ModelQueue] = {}
        """Models that may still run operations, in the order of creation."""
        self.corrupted: dict[str, ModelQueue] = {}
        # closed models, each with the time at which it was closed
        self._with_keys: deque[tuple[float, ModelQueue]] = deque()

    def find(self, model_id: str) -> ModelQueue | None:
        return self.all.get(model_id)

    def add(self, queue: ModelQueue) -> None:
        self.all[queue.model_id] = queue
        if queue.is_open:
            self.open[queue.model_id] = queue
        else:
            self._note_closed(queue)

    def close(self, queue: ModelQueue, phase: ModelPhase, reason: str) -> None:
        """Close the model: no operation of the model runs again, in this process or after a restart."""
        queue.phase, queue.reason = phase, reason
        self.open.pop(queue.model_id, None)
        self._note_closed(queue)
        for entry in [entry for entry in queue.entries.values() if entry.is_finished]:
            queue.settle(entry)

    def _note_closed(self, queue: ModelQueue) -> None:
        if queue.plain.keys:
            self._with_keys.append((time.monotonic(), queue))
        if queue.phase == "corrupted":
            self.corrupted[queue.model_id] = queue

    def remove(self, model_ids: Iterable[str]) -> list[ModelQueue]:
        """Remove the models, and return the queues of these models."""
        queues = [self.all.pop(model_id) for model_id in model_ids]
        for queue in queues:
            self.open.pop(queue.model_id, None)
            self.corrupted.pop(queue.model_id, None)
        return queues

    def forget_keys(self, closed_before: float) -> None:
        """Drop the idempotency keys of models that were closed before this time of the monotonic clock.

        A client repeats a submission within minutes. A model has up to 4,096 keys, which take 750 KiB.
        """
        while self._with_keys and self._with_keys[0][0] < closed_before:
            _, queue = self._with_keys.popleft()
            queue.plain.forget_keys()
