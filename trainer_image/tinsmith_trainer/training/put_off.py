"""Operations that are put off: they run again later, as if they had not run, and meanwhile their model is held with a
reason. Other models train on.

A create or a load may be seen only with a snapshot. Where that finds no room it is undone, so that in memory no model
is ahead of the journal.
"""

from __future__ import annotations

import time

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.disk.free_space import ROOM_RETRY_SECONDS, longer_retry_seconds
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import JournalFull, StorageFull, TrainerError
from tinsmith_trainer.oplog.journal_tables import Operation, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import CREATES, ModelQueues
from tinsmith_trainer.training.parking import Parking
from tinsmith_trainer.training.snapshotting import ModelSnapshots
from tinsmith_trainer.training.storage_retries import retry_seconds

log = structlog.get_logger(__name__)

NEED_SNAPSHOTS = (*CREATES, worker_pb2.LOAD_WEIGHTS)


class PutOff:
    """Used by the engine's thread alone."""

    def __init__(self, engine: Engine, queues: ModelQueues, parking: Parking, snapshots: ModelSnapshots) -> None:
        self._engine = engine
        self._queues = queues
        self._parking = parking
        self._snapshots = snapshots

    def after(self, queue: ModelQueue, operation: Operation, error: Exception) -> bool:
        """Whether this error only puts it off."""
        now = time.monotonic()
        since = now if queue.retried_since is None else queue.retried_since
        seconds = retry_seconds(operation.kind, error, now - since)
        if seconds is None:
            return False
        queue.retried_since = since
        tell = log.warning if isinstance(error, TrainerError) else log.exception
        tell("operation is retried later", model_id=queue.model_id, seq_id=operation.seq_id, reason=str(error))
        self._queues.hold(queue, seconds, _reason(queue, error) if _is_for_room(error) else "")
        return True

    def until_room(self, queue: ModelQueue, entry: Entry) -> bool:
        """Whether the snapshot that it needs found no room before, and would find none now. Then its model is held, and
        no adapter leaves its slot for it.
        """
        if entry.operation.kind not in NEED_SNAPSHOTS or entry.is_finished or not queue.wanted_bytes:
            return False
        if self._snapshots.has_room_for(queue.wanted_bytes):
            return False
        self._queues.hold(queue, ROOM_RETRY_SECONDS, queue.held_because)
        return True

    def undo(self, queue: ModelQueue, operation: Operation, result: OperationResult, error: JournalFull) -> None:
        """Takes a create or a load back, whose snapshot found no room, and holds its model."""
        if operation.kind in CREATES:
            self._parking.free(queue)
        else:
            assert result.replaced is not None, "a load has taken the place of something"
            self._engine.load_state(queue.model_id, result.replaced, with_optimizer=True)
        log.warning("operation is undone", model_id=queue.model_id, seq_id=operation.seq_id, reason=str(error))
        queue.undone_seconds = longer_retry_seconds(queue.undone_seconds)
        self._queues.hold(queue, queue.undone_seconds, _reason(queue, error))


def _is_for_room(error: Exception) -> bool:
    return isinstance(error, JournalFull | StorageFull)


def _reason(queue: ModelQueue, error: Exception) -> str:
    return (
        f"{queue.model_id} waits: {str(error).rstrip('.')}. Nothing of it is lost: it is tried again by itself. "
        "Other models train on."
    )
