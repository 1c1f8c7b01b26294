"""The restoration of models from snapshots.

A model is restored, or waits, or is marked as lost if the volume has lost the snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.snapshots import SnapshotFile, SnapshotFolder
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import ServerError, SnapshotDamaged, is_out_of_memory
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.attempts import Attempts, reason_to_wait
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.model_queue import ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.oplog.result_tables import Stamp
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import EngineCall, InFlightWork

MEMORY_RETRY_SECONDS = 30.0
DAMAGE_RETRY_SECONDS = 60.0
RECOVERED_NAME = "recovered"
"""The name of the checkpoint of a recovered model."""

log = structlog.get_logger(__name__)


class Restorer:
    """The restoration of models. Used by the engine's thread only."""

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
        self._process = engine_call.marker.life
        self._engine = engine
        self._folder = folder
        self._queues = queues
        self._journal = journal
        self._attempts = attempts
        self._engine_call = engine_call
        self._stamp = stamp

    def is_sound(self, queue: ModelQueue) -> bool:
        """Check a snapshot that may stay parked at the start, and read the rank and the step.

        The tensors are not read until the adapter returns to memory.
        """
        try:
            queue.rank, queue.optimizer_step = self._folder.peek(_snapshot_of(queue))
        except SnapshotDamaged as error:
            self._damaged(queue, error)
            return False
        except Exception as error:  # the snapshot may be readable at the model's turn
            log.warning("snapshot not looked at", model_id=queue.model_id, reason=str(error))
        return True

    def restore(self, queue: ModelQueue) -> bool:
        """Restore the model in the engine. Return whether the restoration succeeded."""
        work = InFlightWork("restore", queue.model_id, queue.snapshot_applied)
        if (refusal := self._attempts.refusal(work)) is not None:
            self._queues.quarantine(queue, refusal.message)
            return False
        started = time.perf_counter()
        try:
            with self._engine_call.at(work):
                snapshot = self._folder.read(_snapshot_of(queue))
                reach("restore-before-load")
                self._engine.load_state(queue.model_id, snapshot.state, with_optimizer=True)
        except SnapshotDamaged as error:
            self._damaged(queue, error)
            return False
        except Exception as error:
            log.exception("snapshot not loaded", model_id=queue.model_id)
            self._wait(queue, work, error)
            return False
        self._attempts.succeeded(work)
        self._note_damage(queue, None)
        queue.held_because = ""
        queue.snapshot_seconds = queue.snapshot_seconds or time.perf_counter() - started
        queue.window_failure = snapshot.window_failure
        queue.rank, queue.optimizer_step = snapshot.state.lora.rank, snapshot.state.optimizer_step
        return True

    def _wait(self, queue: ModelQueue, work: InFlightWork, error: Exception) -> None:
        """Hold the model, or quarantine the model.

        Memory may become free at any time, for example when another adapter leaves or another process ends.
        """
        if is_out_of_memory(error):
            because = reason_to_wait(work, None, error, MEMORY_RETRY_SECONDS)
            self._queues.hold(queue, MEMORY_RETRY_SECONDS, because)
        else:
            self._queues.quarantine(queue, reason_to_wait(work, None, error))

    def _damaged(self, queue: ModelQueue, error: SnapshotDamaged) -> None:
        """Mark the model as lost if two processes find the snapshot damaged.

        Until the second process has checked the snapshot, hold the model.

        A single process may report damage wrongly, because of bad memory, a bad node, or a volume that is not mounted.
        """
        if queue.damage_seen_by not in (None, self._process):
            self._corrupt(queue, str(error))
            return
        log.error("snapshot damaged or gone", model_id=queue.model_id, reason=str(error))
        self._note_damage(queue, self._process)
        self._queues.hold(queue, DAMAGE_RETRY_SECONDS, damage_reason(queue.model_id, error))

    def _note_damage(self, queue: ModelQueue, process: str | None) -> None:
        if queue.damage_seen_by != process:
            queue.damage_seen_by = process
            write = partial(journal_tables.note_damage, model_id=queue.model_id, process=process)
            self._journal.write(write, must_succeed=True, model_id=queue.model_id)

    def _corrupt(self, queue: ModelQueue, reason: str) -> None:
        """Mark the model as lost, because the volume has lost the snapshot. Other models continue."""
        log.error("model corrupted", model_id=queue.model_id, reason=reason)
        event = worker_pb2.Event(model_corrupted=worker_pb2.ModelCorrupted(model_id=queue.model_id, reason=reason))

        def write(db: journal_tables.Database) -> None:
            stamp = self._stamp()
            journal_tables.corrupt_model(db, queue.model_id, reason, stamp.time)
            stamp.add_event(db, event)

        self._journal.write(write, must_succeed=True, model_id=queue.model_id)
        self._queues.close_model(queue, "corrupted", reason)


def damage_reason(model_id: str, error: SnapshotDamaged) -> str:
    """Return the reason for a model's wait if only this process has found the snapshot damaged."""
    return (
        f"{model_id} waits: {error} It is read again every {DAMAGE_RETRY_SECONDS:.0f} s. Put the file back, or restart "
        "the worker: if the next process finds the same, the model is given up. Other models continue."
    )


def recover_corrupted(journal: Journal, folder: SnapshotFolder, now: float) -> None:
    """Save each corrupted model whose snapshot can be read again, for example because the file was restored.

    Clients of a corrupted model have already received an error. So a recovered model is saved and released, and clients
    can resume from the checkpoint. Raises JournalFull.
    """
    for model in journal.read(journal_tables.read_models).result():
        if model.phase == "corrupted" and _is_sound(folder, model):
            log.warning("corrupted model is saved: its snapshot is sound", model_id=model.model_id)
            save = worker_pb2.SaveWeights(kind=worker_pb2.TRAINING, name=RECOVERED_NAME, overwrite=True)
            payload = worker_pb2.ReleaseModel(final_checkpoint=save).SerializeToString()
            write = partial(journal_tables.save_and_release, model_id=model.model_id, payload=payload, now=now)
            journal.write(write, uses_reserve=True).result()


def _is_sound(folder: SnapshotFolder, model: journal_tables.StoredModel) -> bool:
    if model.snapshot_file is None or model.snapshot_digest is None:
        return False
    try:
        return folder.is_sound(SnapshotFile(model.snapshot_file, model.snapshot_digest))
    except ServerError:
        return False


def _snapshot_of(queue: ModelQueue) -> SnapshotFile:
    assert queue.snapshot is not None, f"{queue.model_id} has never left a snapshot"
    return queue.snapshot
