"""Results of operations as rows of the journal, with events, saved names and interruptions.

The functions run inside `Journal.read` or `write`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.oplog.journal_tables import CREATES, Database, Operation, OperationResult, set_model_phase
from tinsmith_trainer.oplog.step_events import note_gradient, take_step
from tinsmith_trainer.process.in_flight_marker import InFlightWork, Interruption

NEVER_READ = b""
"""The replacement for the body of an operation that ended processes.

The replacement cannot be decoded, so the operation counts as a lost gradient.
"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The epoch and the time (Unix seconds) of an event."""

    epoch: int
    time: float

    def add_event(self, db: Database, event: worker_pb2.Event) -> int:
        """Add an event and return the event's ID."""
        return add_event(db, self._stamped(event))

    def _stamped(self, event: worker_pb2.Event) -> Callable[[int], bytes]:
        def stamp(event_id: int) -> bytes:
            stamped = worker_pb2.Event(event_id=event_id, epoch=self.epoch, time=self.time)
            stamped.MergeFrom(event)
            return stamped.SerializeToString()

        return stamp


def write_operation_result(db: Database, operation: Operation, result: OperationResult, stamp: Stamp) -> None:
    """Write a result, with all changes of other rows that belong to the result. Runs in the journal's thread."""
    model_id, failure = operation.model_id, result.failure
    saved = _add_events(db, model_id, result, stamp)
    record_result(db, model_id, operation.seq_id, replace(result, event_id=saved), stamp.time)
    forget_interruptions(db, InFlightWork("operation", model_id, operation.seq_id))
    note_gradient(db, operation, result)
    if (step := take_step(db, operation, result)) is not None:
        stamp.add_event(db, step)
    if result.given_up:
        drop_body(db, model_id, operation.seq_id)
    if result.snapshot is not None:
        record_snapshot(db, model_id, operation.seq_id, result.snapshot.name, result.snapshot.digest)
    if operation.kind in CREATES:
        set_model_phase(db, model_id, "released" if failure else "live", failure.message if failure else "")
    if result.releases is not None:
        forget_model(db, model_id)


def _add_events(db: Database, model_id: str, result: OperationResult, stamp: Stamp) -> int:
    """Add the events.

    Return the ID of the event that a server must process before a client sees the result, or 0 if no event must be
    processed.

    A client may request the saved checkpoint as soon as the client has the result.
    """
    saved = 0
    for event in result.events:
        event_id = stamp.add_event(db, event)
        if event.HasField("checkpoint_saved"):
            saved = event_id
            if result.saved_name is not None:
                note_saved_name(db, model_id, *result.saved_name, event_id)
    return saved


def record_result(db: Database, model_id: str, seq_id: int, result: OperationResult, now: float) -> None:
    """Record a result only once.

    A replay never changes a recorded result, because a client may have read the result.
    """
    failure = result.failure
    db.execute(
        "UPDATE operations SET status = ?, result = ?, result_protobuf = ?, result_bytes = ?, event_id = ?,"
        " failure_category = ?, failure_message = ?, finished_at = ?, forward_only = ?, started_at = ?"
        " WHERE model_id = ? AND seq_id = ? AND status = 'pending'",
        (
            "failed" if failure else "done",
            result.payload,
            None if failure else int(result.protobuf),
            None if result.payload is None else len(result.payload),
            result.event_id,
            failure.category if failure else None,
            failure.message if failure else None,
            now,
            result.forward_only,
            result.started_at,
            model_id,
            seq_id,
        ),
    )


def drop_body(db: Database, model_id: str, seq_id: int) -> None:
    """Replace the body, so that a replay does not read the original body."""
    db.execute("UPDATE operations SET payload = ? WHERE model_id = ? AND seq_id = ?", (NEVER_READ, model_id, seq_id))


def record_snapshot(db: Database, model_id: str, applied: int, file: str, digest: str) -> None:
    """Record a snapshot of all operations up to `applied`, and delete the inputs of these operations."""
    db.execute(
        "UPDATE operations SET payload = NULL WHERE model_id = ?1 AND seq_id <= ?2 AND payload IS NOT NULL"
        " AND seq_id > (SELECT applied FROM models WHERE model_id = ?1)",
        (model_id, applied),
    )
    db.execute(
        "UPDATE models SET applied = ?, snapshot_file = ?, snapshot_digest = ? WHERE model_id = ?",
        (applied, file, digest, model_id),
    )
    db.execute(
        "DELETE FROM interruptions WHERE model_id = ? AND purpose IN ('snapshot', 'restore') AND seq_id < ?",
        (model_id, applied),
    )


def forget_model(db: Database, model_id: str) -> None:
    """Mark the model as released. The results of the model are kept; inputs and snapshot are deleted."""
    set_model_phase(db, model_id, "released")
    db.execute("DELETE FROM gradients WHERE model_id = ?", (model_id,))
    db.execute("UPDATE models SET snapshot_file = NULL, snapshot_digest = NULL WHERE model_id = ?", (model_id,))
    db.execute("UPDATE operations SET payload = NULL WHERE model_id = ? AND payload IS NOT NULL", (model_id,))


def add_event(db: Database, build: Callable[[int], bytes]) -> int:
    """Add an event with a body that contains the event's ID."""
    db.execute("INSERT INTO events (body) VALUES (x'')")
    event_id = db.last_insert_rowid()
    db.execute("UPDATE events SET body = ? WHERE event_id = ?", (build(event_id), event_id))
    return event_id


def read_events(db: Database, after: int, limit: int = 256) -> list[bytes]:
    rows = db.execute("SELECT body FROM events WHERE event_id > ? ORDER BY event_id LIMIT ?", (after, limit))
    return [bytes(body) for (body,) in rows]


def forget_events(db: Database, up_to: int) -> None:
    # A cursor beyond the last event is from another volume.
    db.execute(
        "DELETE FROM events WHERE event_id <= ?1 AND ?1 <= (SELECT seq FROM sqlite_sequence WHERE name = 'events')",
        (up_to,),
    )


def note_saved_name(db: Database, model_id: str, kind: int, name: str, event_id: int) -> None:
    db.execute(
        "INSERT INTO saved_names VALUES (?, ?, ?, ?)"
        " ON CONFLICT (model_id, kind, name) DO UPDATE SET event_id = excluded.event_id",
        (model_id, kind, name, event_id),
    )


def saved_name_event(db: Database, model_id: str, kind: int, name: str) -> int:
    """Return the ID of the event for the latest save with this name, or 0 if no save has this name."""
    row = db.execute(
        "SELECT event_id FROM saved_names WHERE model_id = ? AND kind = ? AND name = ?", (model_id, kind, name)
    ).fetchone()
    return 0 if row is None else int(row[0])


def count_interruption(db: Database, interruption: Interruption) -> None:
    """Count the end of a process, once for each process.

    If several pieces of work were in flight, the cause of the end is unknown. If the cause is unknown, each piece of
    work becomes a suspect with a count of 0.
    """
    suspects = interruption.suspects
    counts = int(len(suspects) == 1)
    db.executemany(
        "INSERT INTO interruptions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (model_id, seq_id, purpose) DO UPDATE SET"
        " count = count + excluded.count, life = excluded.life, last_sign = excluded.last_sign"
        " WHERE life <> excluded.life",
        [
            (work.model_id, work.seq_id, work.purpose, counts, interruption.life, interruption.last_sign)
            for work in suspects
        ],
    )


def read_interruptions(db: Database) -> dict[InFlightWork, tuple[int, str]]:
    """Return how many processes ended during each piece of work, and the `last_sign` of the latest end."""
    rows = db.execute("SELECT purpose, model_id, seq_id, count, last_sign FROM interruptions")
    return {InFlightWork(*work): (count, last_sign) for *work, count, last_sign in rows}


def forget_interruptions(db: Database, work: InFlightWork) -> None:
    db.execute(
        "DELETE FROM interruptions WHERE model_id = ? AND seq_id = ? AND purpose = ?",
        (work.model_id, work.seq_id, work.purpose),
    )


def forget_all_interruptions(db: Database) -> None:
    db.execute("DELETE FROM interruptions")
