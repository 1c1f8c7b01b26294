"""Models back from their snapshots: in the engine as they were, or waiting, or given up where the volume lost them."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.snapshots import SnapshotFile, SnapshotFolder
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import SnapshotDamaged
from tinsmith_trainer.failpoints import reach
from tinsmith_trainer.in_flight_marker import EngineCall, InFlightWork
from tinsmith_trainer.load_failures import is_out_of_memory
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.attempts import Attempts, reason_to_wait
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.model_queue import ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.training.operation_results import Stamp

MEMORY_RETRY_SECONDS = 30.0

log = structlog.get_logger(__name__)


class Restorer:
    """Used by the engine's thread alone."""

    def __init__(
        self,
        engine: Engine,
        folder: SnapshotFolder,
        queues: ModelQueues,
        journal: Journal,
        attempts: Attempts,
        engine_call: EngineCall,
        stamp: Callable[[], Stamp],
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._queues = queues
        self._journal = journal
        self._attempts = attempts
        self._engine_call = engine_call
        self._stamp = stamp

    def is_sound(self, queue: ModelQueue) -> bool:
        """A first look at what a start may leave parked: its rank and step. Its tensors are read when it comes back."""
        try:
            queue.rank, queue.optimizer_step = self._folder.peek(_snapshot_of(queue))
        except SnapshotDamaged as error:
            self._corrupt(queue, str(error))
            return False
        except Exception as error:  # it may be read when its turn comes
            log.warning("snapshot not looked at", model_id=queue.model_id, reason=str(error))
        return True

    def restore(self, queue: ModelQueue) -> bool:
        """Whether it is in the engine as it was."""
        work = InFlightWork("restore", queue.model_id, queue.snapshot_applied)
        if self._attempts.verdict(work) == "quarantine":
            self._queues.quarantine(queue, self._attempts.quarantine_reason(work))
            return False
        started = time.perf_counter()
        try:
            with self._engine_call.at(work):
                snapshot = self._folder.read(_snapshot_of(queue))
                reach("restore-before-load")
                self._engine.load_state(queue.model_id, snapshot.state, with_optimizer=True)
        except SnapshotDamaged as error:
            self._corrupt(queue, str(error))
            return False
        except Exception as error:
            log.exception("snapshot not loaded", model_id=queue.model_id)
            self._wait(queue, work, error)
            return False
        self._attempts.succeeded(work)
        queue.held_because = ""
        queue.snapshot_seconds = queue.snapshot_seconds or time.perf_counter() - started
        queue.window_failure = snapshot.window_failure
        queue.rank, queue.optimizer_step = snapshot.state.lora.rank, snapshot.state.optimizer_step
        return True

    def _wait(self, queue: ModelQueue, work: InFlightWork, error: Exception) -> None:
        """Memory may come free at any time: another adapter leaves, or another process ends."""
        if is_out_of_memory(error):
            because = reason_to_wait(work, None, error, MEMORY_RETRY_SECONDS)
            self._queues.hold(queue, MEMORY_RETRY_SECONDS, because)
        else:
            self._queues.quarantine(queue, reason_to_wait(work, None, error))

    def _corrupt(self, queue: ModelQueue, reason: str) -> None:
        """The volume lost what this model was; the others go on."""
        log.error("model corrupted", model_id=queue.model_id, reason=reason)
        event = worker_pb2.Event(model_corrupted=worker_pb2.ModelCorrupted(model_id=queue.model_id, reason=reason))

        def write(db: journal_tables.Database) -> None:
            journal_tables.set_model_phase(db, queue.model_id, "corrupted", reason)
            self._stamp().add_event(db, event)

        self._journal.write(write, must_succeed=True, model_id=queue.model_id)
        self._queues.close_model(queue, "corrupted", reason)


def _snapshot_of(queue: ModelQueue) -> SnapshotFile:
    assert queue.snapshot is not None, f"{queue.model_id} has never left a snapshot"
    return queue.snapshot
