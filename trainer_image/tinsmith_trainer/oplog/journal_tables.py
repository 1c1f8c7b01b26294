"""Operations and models as rows of the journal.

The functions run inside `Journal.read` or `write`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import apsw
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2

from tinsmith_trainer.checkpoints.checkpoint_root import SavedWeights
from tinsmith_trainer.checkpoints.snapshots import SnapshotFile
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import Failure
from tinsmith_trainer.oplog.ordering import NumberRanges

T = TypeVar("T")

Database = apsw.Connection
Status = Literal["pending", "done", "failed", "late"]
"""`late`: the sequence number was skipped before the operation arrived.

The operation failed immediately, and was never queued.
"""
ModelPhase = Literal["creating", "live", "released", "corrupted"]

CREATES = (worker_pb2.CREATE_MODEL, worker_pb2.LOAD_MODEL)

HIGHEST_NUMBER = 2**63 - 1
"""The highest number that SQLite can hold."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An accepted operation without the payload, which is read when the operation runs."""

    model_id: str
    seq_id: int
    kind: worker_pb2.OperationKind.ValueType
    zstd: bool
    accepted_at: float
    rejection: Failure | None = None
    forward_only: bool | None = None  # only for a forward_backward that has run; None: the body must be read
    idempotency_key: str = ""  # only for an operation that came without a number
    traceparent: str = ""  # of the request, in memory only

    @property
    def is_forward_backward(self) -> bool:
        return self.kind == worker_pb2.FORWARD_BACKWARD

    @property
    def changes_the_adapter(self) -> bool:
        """Return whether the operation may change the adapter. Other operations need no replay."""
        return self.kind != worker_pb2.SAVE_WEIGHTS


@dataclass(frozen=True, slots=True)
class GradientSums:
    """The sums of a call that adds to the gradients.

    `loss` is the sum over `loss_terms` tokens or datums, `gap` the sum of |trainer logprob - sampler logprob| over
    `gap_tokens` tokens, and `tokens` are the tokens of all inputs.
    """

    tokens: int
    loss: float
    loss_terms: int
    gap: float = 0.0
    gap_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of an optimizer step. `grad_norm` is the norm before clipping."""

    step: int
    learning_rate: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The result of an operation, as clients get it from the journal."""

    payload: bytes | None = None  # protobuf or JSON; None: the operation failed, or its result has expired
    protobuf: bool = False
    failure: Failure | None = None
    event_id: int | None = None  # see `worker.proto`; None: not yet in the journal
    # Used only between the run and the commit: data that the same transaction writes.
    events: tuple[worker_pb2.Event, ...] = ()  # without ID, epoch and time, which the journal adds
    saved_name: tuple[int, str] | None = None  # checkpoint kind and name
    saved: SavedWeights | None = None
    forces_snapshot: bool = False
    replaced: AdapterState | None = None  # the state before a load, until a snapshot of the new state exists
    snapshot: SnapshotFile | None = None
    trained_tokens: int = 0
    input_tokens: int = 0
    started_at: float | None = None  # Unix seconds; None: it never had a turn
    ended_at: float | None = None  # of the last turn, in memory only
    forward_only: bool | None = None  # only for a forward_backward
    # the reason of the model's release, which may be empty; None: the model is not released
    releases: str | None = None
    given_up: bool = False
    seconds: float = 0.0  # of the engine
    gradient: GradientSums | None = None  # only for a forward_backward
    step: StepFigures | None = None  # only for an optim_step


@dataclass(frozen=True, slots=True)
class StoredOperation:
    operation: Operation
    status: Status
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class StoredModel:
    model_id: str
    phase: ModelPhase
    reason: str
    applied: int
    closed_below: int
    snapshot_file: str | None
    snapshot_digest: str | None
    tenant: str | None  # None: unknown
    damage_seen_by: str | None  # the process that found the snapshot missing or altered; None: no process
    corrupted_at: float | None  # Unix seconds; None: it is not corrupted

    @property
    def is_open(self) -> bool:
        return self.phase in ("creating", "live")

    @property
    def settled_up_to(self) -> int:
        """The number up to which no operation with a result runs again."""
        return self.applied if self.is_open else HIGHEST_NUMBER

    @property
    def spent_up_to(self) -> int:
        """The number up to which the bodies of operations with a result are not needed any more.

        If the snapshot of a corrupted model becomes readable again, the bodies after this number restore the model.
        """
        return HIGHEST_NUMBER if self.phase == "released" else self.applied


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Split the items into steps for the journal's thread. Other writes wait until a step ends."""
    return (items[first : first + size] for first in range(0, len(items), size))


def get_meta(db: Database, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_meta(db: Database, key: str, value: str) -> None:
    db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))


def raise_epoch(db: Database, epoch: int, event_cursor: int) -> int:
    """Block older epochs, and make the numbers of new events higher than the cursor.

    Return the highest epoch that the journal has seen.
    """
    db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'events'", (event_cursor,))
    highest = max(epoch, int(get_meta(db, "epoch") or 0))
    set_meta(db, "epoch", str(highest))
    return highest


def insert_operation(db: Database, operation: Operation, payload: bytes, late: Failure | None, now: float) -> None:
    """Insert an accepted operation.

    With `late`, the operation is recorded as failed and never runs, unless the model was deleted at the same time.
    """
    if late and not db.execute("SELECT 1 FROM models WHERE model_id = ?", (operation.model_id,)).fetchone():
        return
    rejection = operation.rejection
    db.execute(
        "INSERT INTO operations (model_id, seq_id, kind, payload, zstd, rejection_category, rejection_message,"
        " accepted_at, status, failure_category, failure_message, finished_at, idempotency_key)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            operation.model_id,
            operation.seq_id,
            int(operation.kind),
            None if late else payload,
            int(operation.zstd),
            rejection.category if rejection else None,
            rejection.message if rejection else None,
            operation.accepted_at,
            "late" if late else "pending",
            late.category if late else None,
            late.message if late else None,
            now if late else None,
            operation.idempotency_key or None,
        ),
    )


def insert_model(db: Database, model_id: str, tenant: str) -> None:
    db.execute(
        "INSERT OR IGNORE INTO models (model_id, state, tenant) VALUES (?, 'creating', ?)", (model_id, tenant or None)
    )


def set_model_phase(db: Database, model_id: str, phase: ModelPhase, reason: str = "") -> None:
    db.execute("UPDATE models SET state = ?, reason = ? WHERE model_id = ?", (phase, reason, model_id))


def note_damage(db: Database, model_id: str, process: str | None) -> None:
    """Record the process that found the model's snapshot missing or altered, or None for an intact snapshot."""
    db.execute("UPDATE models SET damage_seen_by = ? WHERE model_id = ?", (process, model_id))


def corrupt_model(db: Database, model_id: str, reason: str, now: float) -> None:
    set_model_phase(db, model_id, "corrupted", reason)
    db.execute("UPDATE models SET corrupted_at = ? WHERE model_id = ?", (now, model_id))


def save_and_release(db: Database, model_id: str, payload: bytes, now: float) -> None:
    """Open a corrupted model again, so that a release can save the model first. For clients, the model has ended."""
    set_model_phase(db, model_id, "live")
    note_damage(db, model_id, None)
    db.execute("UPDATE models SET corrupted_at = NULL WHERE model_id = ?", (model_id,))
    db.execute("DELETE FROM operations WHERE model_id = ? AND seq_id = ?", (model_id, RELEASE_SEQ_ID))
    release = Operation(model_id, RELEASE_SEQ_ID, worker_pb2.RELEASE_MODEL, zstd=False, accepted_at=now)
    insert_operation(db, release, payload, None, now)


def raise_closed_below(db: Database, model_id: str, seq_id: int) -> None:
    db.execute(
        "UPDATE models SET closed_below = max(closed_below, ?) WHERE model_id = ?",
        (seq_id, model_id),
    )


def record_late(db: Database, model_id: str, seq_id: int, failure: Failure, now: float) -> None:
    """Fail an accepted operation if its sequence number was skipped before the operation could be queued."""
    db.execute(
        "UPDATE operations SET status = 'late', payload = NULL, failure_category = ?, failure_message = ?,"
        " finished_at = ? WHERE model_id = ? AND seq_id = ? AND status = 'pending'",
        (failure.category, failure.message, now, model_id, seq_id),
    )


def read_payload(db: Database, model_id: str, seq_id: int) -> bytes:
    row = db.execute("SELECT payload FROM operations WHERE model_id = ? AND seq_id = ?", (model_id, seq_id)).fetchone()
    if row is None or row[0] is None:
        raise AssertionError(f"the payload of operation {seq_id} of {model_id} was forgotten before its turn")
    return bytes(row[0])


def read_result(db: Database, model_id: str, seq_id: int) -> OperationResult | None:
    """Return the result of an accepted operation, or None while the operation is pending.

    If the operation's row is deleted, the result has no payload.
    """
    row = db.execute(
        "SELECT status, result, result_protobuf, event_id, failure_category, failure_message FROM operations"
        " WHERE model_id = ? AND seq_id = ?",
        (model_id, seq_id),
    ).fetchone()
    if row is None:
        return OperationResult()
    if row[0] == "pending":
        return None
    status, result, protobuf, event_id, category, message = row
    failure = None if status == "done" else Failure(category, message)
    return OperationResult(None if result is None else bytes(result), bool(protobuf), failure, event_id)


def read_models(db: Database) -> list[StoredModel]:
    rows = db.execute(
        "SELECT model_id, state, reason, applied, closed_below, snapshot_file, snapshot_digest, tenant,"
        " damage_seen_by, corrupted_at FROM models ORDER BY rowid"
    )
    return [StoredModel(*row) for row in rows]


def read_unsettled(db: Database, model: StoredModel) -> list[StoredOperation]:
    """Return, in order, the operations without a result and the operations that must run again.

    Payloads and results are left out.
    """
    columns = (
        "SELECT seq_id, kind, zstd, accepted_at, rejection_category, rejection_message, forward_only, status,"
        " failure_category, failure_message FROM operations WHERE model_id = ?1"
    )
    rows = db.execute(
        f"{columns} AND seq_id <= ?2 AND status = 'pending' UNION ALL"
        f" {columns} AND seq_id > ?2 AND status <> 'late' ORDER BY seq_id",
        (model.model_id, model.settled_up_to),
    )
    return [_stored_operation(model.model_id, row) for row in rows]


def read_settled(db: Database, model: StoredModel) -> NumberRanges:
    """Return the numbers of all operations that `read_unsettled` does not return."""
    settled = read_forgotten(db, model.model_id)
    rows = db.execute(
        "SELECT seq_id FROM operations WHERE model_id = ? AND (status = 'late' OR seq_id <= ? AND status <> 'pending')"
        " ORDER BY seq_id",
        (model.model_id, model.settled_up_to),
    )
    for (seq_id,) in rows:
        settled.add(int(seq_id))
    return settled


def read_forgotten(db: Database, model_id: str) -> NumberRanges:
    """Return the numbers of operations with deleted rows."""
    return NumberRanges(
        (int(first), int(last))
        for first, last in db.execute(
            "SELECT first, last FROM forgotten WHERE model_id = ? ORDER BY first", (model_id,)
        )
    )


def last_accepted_at(db: Database, model_id: str) -> float:
    """Return the time at which the operation with the highest stored number was accepted, in Unix seconds.

    If the journal has no operation, return 0.
    """
    row = db.execute(
        "SELECT accepted_at FROM operations WHERE model_id = ? ORDER BY seq_id DESC LIMIT 1", (model_id,)
    ).fetchone()
    return 0.0 if row is None else float(row[0])


def _stored_operation(model_id: str, row: tuple) -> StoredOperation:  # type: ignore[type-arg]
    seq_id, kind, zstd, accepted_at, rejection_category, rejection_message, forward_only, *outcome = row
    status, category, message = outcome
    rejection = Failure(rejection_category, rejection_message) if rejection_category else None
    only = None if forward_only is None else bool(forward_only)
    operation = Operation(model_id, seq_id, kind, bool(zstd), accepted_at, rejection, only)
    return StoredOperation(operation, status, Failure(category, message) if status in ("failed", "late") else None)


def count_to_replay(db: Database) -> int:
    """Return the number of finished operations that a replay must run again."""
    row = db.execute(
        "SELECT COUNT(*) FROM operations JOIN models USING (model_id)"
        " WHERE state IN ('creating', 'live') AND seq_id > applied AND status = 'done' AND kind <> ?",
        (int(worker_pb2.SAVE_WEIGHTS),),
    ).fetchone()
    return int(row[0]) if row else 0
