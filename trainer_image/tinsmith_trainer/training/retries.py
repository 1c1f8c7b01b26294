"""Operations that run again later instead of failing. The model is held until the retry, and other models continue.

Clients treat a failed save or load as final, although an outage of the checkpoint root may end within a minute. A full
volume does not cause the failure of an accepted operation. The result of a create or a load becomes visible only
together with a snapshot. If the volume has no space for the snapshot, the operation is undone. Without the undo, the
model in memory would be newer than the journal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.disk.free_space import ROOM_RETRY_SECONDS, longer_retry_seconds
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import Failure, JournalFull, StorageUnavailable, TrainerError
from tinsmith_trainer.oplog.journal_tables import CREATES, Operation, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.training.parking import Parking
from tinsmith_trainer.training.snapshotting import ModelSnapshots

log = structlog.get_logger(__name__)

RELEASE_RETRY_SECONDS = 30.0
STORAGE_RETRY_SECONDS = 10.0
STORAGE_WAIT_SECONDS = 300.0
"""The time for which an operation waits for the checkpoint root, counted from the operation's first attempt."""

NEED_STORAGE = (worker_pb2.SAVE_WEIGHTS, worker_pb2.LOAD_WEIGHTS, worker_pb2.LOAD_MODEL)
NEED_SNAPSHOTS = (*CREATES, worker_pb2.LOAD_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Retry:
    """The decision to repeat an operation that had no effect.

    `seconds` is the time for which the model is held. If `seconds` is None, the model is held until the worker
    restarts. `reason` is shown to clients, and may be empty.
    """

    seconds: float | None
    reason: str = ""


class Retries:
    """The decisions about failed operations. Used by the engine's thread only."""

    def __init__(self, engine: Engine, queues: ModelQueues, parking: Parking, snapshots: ModelSnapshots) -> None:
        self._engine = engine
        self._queues = queues
        self._parking = parking
        self._snapshots = snapshots

    def after(self, queue: ModelQueue, operation: Operation, error: Exception) -> Retry | Failure:
        """Decide whether the operation that raised this error is tried again, or fails.

        Unexpected errors are logged.
        """
        now = time.monotonic()
        since = now if queue.retried_since is None else queue.retried_since
        seconds = retry_seconds(operation.kind, error, now - since)
        if seconds is None:
            return _failure(operation, error)
        queue.retried_since = since
        write_log = log.warning if isinstance(error, TrainerError) else log.exception
        write_log("operation is retried later", model_id=queue.model_id, seq_id=operation.seq_id, reason=str(error))
        return Retry(seconds, _reason(queue, error) if _is_of_storage(error) else "")

    def must_wait(self, queue: ModelQueue, entry: Entry) -> bool:
        """Hold the model if the volume had no space for the operation's snapshot before, and still has no space.

        While a model is held, no other adapter loses a slot for this model.
        """
        if entry.operation.kind not in NEED_SNAPSHOTS or entry.is_finished or not queue.failed_snapshot_bytes:
            return False
        if self._snapshots.has_room_for(queue.failed_snapshot_bytes):
            return False
        self._queues.hold(queue, ROOM_RETRY_SECONDS, queue.held_because)
        return True

    def undo(self, queue: ModelQueue, operation: Operation, result: OperationResult, error: JournalFull) -> Retry:
        """Undo a create or a load if the volume has no space for the snapshot."""
        if operation.kind in CREATES:
            self._parking.free(queue)
        else:
            assert result.replaced is not None, "a load has taken the place of something"
            self._engine.load_state(queue.model_id, result.replaced, with_optimizer=True)
        log.warning("operation is undone", model_id=queue.model_id, seq_id=operation.seq_id, reason=str(error))
        queue.undone_seconds = longer_retry_seconds(queue.undone_seconds)
        return Retry(queue.undone_seconds, _reason(queue, error))


def _failure(operation: Operation, error: Exception) -> Failure:
    if isinstance(error, TrainerError):
        return Failure(error.category, final_message(operation.kind, error))
    log.error("operation failed", model_id=operation.model_id, seq_id=operation.seq_id, exc_info=error)
    return Failure("server", f"{type(error).__name__}: {error}")


def _is_of_storage(error: Exception) -> bool:
    """Return whether the volume or the checkpoint root is the cause. Waiting clients then get the error."""
    return isinstance(error, JournalFull | StorageUnavailable)


def _reason(queue: ModelQueue, error: Exception) -> str:
    return (
        f"{queue.model_id} waits: {str(error).rstrip('.')}. Nothing is lost: the worker retries it. "
        "Other models continue."
    )


def retry_seconds(kind: worker_pb2.OperationKind.ValueType, error: Exception, waited_seconds: float) -> float | None:
    """Return the seconds until the operation is tried again, or None if the error becomes the result."""
    # without its last checkpoint the model's work would be lost, so it keeps its slot
    if kind == worker_pb2.RELEASE_MODEL:
        return RELEASE_RETRY_SECONDS
    if isinstance(error, JournalFull):
        return ROOM_RETRY_SECONDS  # each attempt only checks the free space
    if not waits_for_storage(kind, error) or waited_seconds >= STORAGE_WAIT_SECONDS:
        return None
    return min(STORAGE_RETRY_SECONDS, STORAGE_WAIT_SECONDS - waited_seconds)


def waits_for_storage(kind: worker_pb2.OperationKind.ValueType, error: Exception) -> bool:
    return kind in NEED_STORAGE and isinstance(error, StorageUnavailable)


def final_message(kind: worker_pb2.OperationKind.ValueType, error: Exception) -> str:
    """Return the message for the client of an operation that failed with this error."""
    if not waits_for_storage(kind, error):
        return str(error)
    return (
        f"{str(error).rstrip('.')}. It was tried again for {STORAGE_WAIT_SECONDS:.0f} s. "
        "Send the request again when the storage answers."
    )
