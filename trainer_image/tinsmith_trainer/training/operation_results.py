"""What became of an operation, and what of it goes to disk in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.snapshots import SnapshotFile
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.in_flight_marker import Work
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal_tables import Failure, Operation, Success
from tinsmith_trainer.oplog.model_queues import CREATES
from tinsmith_trainer.training.executor import Executed
from tinsmith_trainer.training.retry_policy import final_message

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OperationResult:
    outcome: Success | Failure
    executed: Executed | None = None
    snapshot: SnapshotFile | None = None
    given_up: bool = False

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None


@dataclass(frozen=True, slots=True)
class Stamp:
    """Under whose epoch, and when (Unix seconds), something happened."""

    epoch: int
    time: float

    def add_event(self, db: journal_tables.Database, event: worker_pb2.Event) -> int:
        """Returns its id."""
        return journal_tables.add_event(db, self._stamped(event))

    def _stamped(self, event: worker_pb2.Event) -> Callable[[int], bytes]:
        def stamp(event_id: int) -> bytes:
            stamped = worker_pb2.Event(event_id=event_id, epoch=self.epoch, time=self.time)
            stamped.MergeFrom(event)
            return stamped.SerializeToString()

        return stamp


def failure_of(operation: Operation, error: Exception) -> Failure:
    """What the client hears of an error; one that nobody foresaw is logged, too."""
    if isinstance(error, TrainerError):
        return Failure(error.category, final_message(operation.kind, error))
    log.error("operation failed", model_id=operation.model_id, seq_id=operation.seq_id, exc_info=error)
    return Failure("server", f"{type(error).__name__}: {error}")


def write_operation_result(
    db: journal_tables.Database, operation: Operation, finding: OperationResult, stamp: Stamp
) -> None:
    """In the journal's thread."""
    model_id = operation.model_id
    journal_tables.record_outcome(db, model_id, operation.seq_id, finding.outcome, stamp.time)
    journal_tables.forget_interruptions(db, Work("operation", model_id, operation.seq_id))
    if finding.given_up:
        journal_tables.drop_body(db, model_id, operation.seq_id)
    if finding.snapshot is not None:
        journal_tables.record_snapshot(db, model_id, operation.seq_id, finding.snapshot.name, finding.snapshot.digest)
    if operation.kind in CREATES:
        failure = finding.failure
        journal_tables.set_model_phase(
            db, model_id, "released" if failure else "live", failure.message if failure else ""
        )
    if finding.executed is not None:
        _write_executed(db, model_id, finding.executed, stamp)


def _write_executed(db: journal_tables.Database, model_id: str, executed: Executed, stamp: Stamp) -> None:
    for event in executed.events:
        event_id = stamp.add_event(db, event)
        if executed.saved_name is not None and event.HasField("checkpoint_saved"):
            journal_tables.note_saved_name(db, model_id, *executed.saved_name, event_id)
    if executed.releases:
        journal_tables.forget_model(db, model_id)
