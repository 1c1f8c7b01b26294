"""When a model is snapshot, and how long that takes. The engine's thread alone, which holds the state."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFile, SnapshotFolder
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import JournalFull, SnapshotRefused
from tinsmith_trainer.in_flight_marker import EngineCall, Work
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.journal import FULL_RETRY_SECONDS
from tinsmith_trainer.oplog.model_queue import ModelQueue


class RequestedSnapshot:
    """Thread-safe. Its future resolves to the moment of the snapshot, in Unix seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: Future[float] | None = None

    def ask(self, arrange: Callable[[], None]) -> Future[float]:
        """The first one's `arrange` has it taken."""
        with self._lock:
            if self._asked is None:
                self._asked = Future()
                self._asked.set_running_or_notify_cancel()  # one who gives up must not take it from others
                arrange()
            return self._asked

    def begin(self) -> Future[float] | None:
        """From now on others ask for the next one. None: nobody has asked."""
        with self._lock:
            asked, self._asked = self._asked, None
            return asked


log = structlog.get_logger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """A snapshot is due when replay after a crash would cost this much, or this many times the snapshot itself."""

    replay_seconds: float = 10.0
    times_snapshot_cost: float = 20.0


class Snapshotter:
    """Writes files; whether one counts is the journal's affair."""

    def __init__(
        self,
        engine: Engine,
        folder: SnapshotFolder,
        engine_call: EngineCall,
        attempts: Attempts,
        policy: SnapshotPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.last_time = 0.0
        self._engine = engine
        self._folder = folder
        self._engine_call = engine_call
        self._attempts = attempts
        self._policy = policy
        self._clock = clock
        self._cost_seconds = 0.0

    def if_due(self, queue: ModelQueue, applied: int) -> SnapshotFile | None:
        """Only shortens a replay: where it fails, the journal keeps its inputs."""
        limit = max(self._policy.replay_seconds, self._policy.times_snapshot_cost * self._cost_seconds)
        if queue.replay_seconds <= limit:
            return None
        try:
            return self._write_unless_deadly(queue, applied)
        except Exception as error:
            log.warning("no snapshot", model_id=queue.model_id, error=str(error) or type(error).__name__)
            return None

    def when_there_is_room(self, queue: ModelQueue, work: Work) -> SnapshotFile:
        """The operation has had its effect, and its result may only be seen with the snapshot: so it waits.

        A process that ends here has ended at the operation. So it should where this raises, for any other reason.
        """
        while True:
            try:
                return self._write(queue, work.seq_id, work)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                log.warning("waiting for room for a snapshot", model_id=queue.model_id)
                time.sleep(FULL_RETRY_SECONDS)

    def now(self, queue: ModelQueue, applied: int) -> SnapshotFile:
        """Raises JournalFull, SnapshotRefused, or another OSError."""
        try:
            return self._write_unless_deadly(queue, applied)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise JournalFull(
                f"The volume has no room for a snapshot of {queue.model_id}: make room, then ask again. "
                "What was trained since its last one is still in the journal."
            ) from error

    def _write_unless_deadly(self, queue: ModelQueue, applied: int) -> SnapshotFile:
        """Only shortens a replay: one that ends every process is better not taken."""
        work = Work("snapshot", queue.model_id, queue.snapshot_applied)
        if self._attempts.verdict(work) != "run":
            raise SnapshotRefused(self._attempts.snapshot_refusal(work))
        file = self._write(queue, applied, work)
        self._attempts.succeeded(work)
        return file

    def _write(self, queue: ModelQueue, applied: int, work: Work) -> SnapshotFile:
        started = time.perf_counter()
        with self._engine_call.at(work):
            state = self._engine.state(queue.model_id)
            file = self._folder.write(Snapshot(queue.model_id, applied, state, queue.window_failure))
        self._cost_seconds = queue.snapshot_seconds = time.perf_counter() - started
        self.last_time = self._clock()
        queue.rank, queue.optimizer_step = state.lora.rank, state.optimizer_step
        queue.replay_seconds = 0.0
        return file
