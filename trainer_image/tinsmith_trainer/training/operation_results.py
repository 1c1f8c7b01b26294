"""What became of an operation, and what of it goes to disk in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import Failure, TrainerError
from tinsmith_trainer.oplog import event_tables, journal_tables
from tinsmith_trainer.oplog.journal_tables import Operation, OperationResult
from tinsmith_trainer.oplog.model_queues import CREATES
from tinsmith_trainer.process.in_flight_marker import InFlightWork
from tinsmith_trainer.training.storage_retries import final_message

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Under whose epoch, and when (Unix seconds), something happened."""

    epoch: int
    time: float

    def add_event(self, db: journal_tables.Database, event: worker_pb2.Event) -> int:
        """Returns its id."""
        return event_tables.add_event(db, self._stamped(event))

    def _stamped(self, event: worker_pb2.Event) -> Callable[[int], bytes]:
        def stamp(event_id: int) -> bytes:
            stamped = worker_pb2.Event(event_id=event_id, epoch=self.epoch, time=self.time)
            stamped.MergeFrom(event)
            return stamped.SerializeToString()

        return stamp


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    operations_done: int = 0
    operations_failed: int = 0
    operations_given_up: int = 0
    trained_tokens: int = 0
    train_seconds: float = 0.0


def failure_of(operation: Operation, error: Exception) -> Failure:
    """What the client hears of an error; one that nobody foresaw is logged, too."""
    if isinstance(error, TrainerError):
        return Failure(error.category, final_message(operation.kind, error))
    log.error("operation failed", model_id=operation.model_id, seq_id=operation.seq_id, exc_info=error)
    return Failure("server", f"{type(error).__name__}: {error}")


def write_operation_result(
    db: journal_tables.Database, operation: Operation, result: OperationResult, stamp: Stamp
) -> None:
    """In the journal's thread."""
    model_id, failure = operation.model_id, result.failure
    saved = _add_events(db, model_id, result, stamp)
    journal_tables.record_result(db, model_id, operation.seq_id, replace(result, event_id=saved), stamp.time)
    event_tables.forget_interruptions(db, InFlightWork("operation", model_id, operation.seq_id))
    if result.given_up:
        journal_tables.drop_body(db, model_id, operation.seq_id)
    if result.snapshot is not None:
        journal_tables.record_snapshot(db, model_id, operation.seq_id, result.snapshot.name, result.snapshot.digest)
    if operation.kind in CREATES:
        journal_tables.set_model_phase(
            db, model_id, "released" if failure else "live", failure.message if failure else ""
        )
    if result.releases is not None:
        journal_tables.forget_model(db, model_id)


def _add_events(db: journal_tables.Database, model_id: str, result: OperationResult, stamp: Stamp) -> int:
    """Returns the one that a server must know before a client sees the result, since a client may ask for it next."""
    saved = 0
    for event in result.events:
        event_id = stamp.add_event(db, event)
        if event.HasField("checkpoint_saved"):
            saved = event_id
            if result.saved_name is not None:
                event_tables.note_saved_name(db, model_id, *result.saved_name, event_id)
    return saved
