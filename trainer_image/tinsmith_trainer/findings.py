"""What became of an operation, and what of it goes to disk in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer import operations as rows
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.executor import Executed
from tinsmith_trainer.lines import CREATES
from tinsmith_trainer.operations import Failure, Operation, Success
from tinsmith_trainer.putting_off import final_message
from tinsmith_trainer.running_mark import Work
from tinsmith_trainer.snapshots import SnapshotFile

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
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

    def add_event(self, db: rows.Database, event: worker_pb2.Event) -> int:
        """Returns its id."""
        return rows.add_event(db, self._stamped(event))

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


def write_finding(db: rows.Database, operation: Operation, finding: Finding, stamp: Stamp) -> None:
    """In the journal's thread."""
    model_id = operation.model_id
    rows.record_outcome(db, model_id, operation.seq_id, finding.outcome, stamp.time)
    rows.forget_interruptions(db, Work("operation", model_id, operation.seq_id))
    if finding.given_up:
        rows.drop_body(db, model_id, operation.seq_id)
    if finding.snapshot is not None:
        rows.record_snapshot(db, model_id, operation.seq_id, finding.snapshot.name, finding.snapshot.digest)
    if operation.kind in CREATES:
        failure = finding.failure
        rows.set_model_phase(db, model_id, "released" if failure else "live", failure.message if failure else "")
    if finding.executed is not None:
        _write_executed(db, model_id, finding.executed, stamp)


def _write_executed(db: rows.Database, model_id: str, executed: Executed, stamp: Stamp) -> None:
    for event in executed.events:
        event_id = stamp.add_event(db, event)
        if executed.saved_name is not None and event.HasField("checkpoint_saved"):
            rows.note_saved_name(db, model_id, *executed.saved_name, event_id)
    if executed.releases:
        rows.forget_model(db, model_id)
