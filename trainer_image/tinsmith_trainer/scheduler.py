"""Runs accepted operations on the engine: each model's in order, models in turn, results durable first.

The engine's thread takes a turn, executes it, and hands outcome, snapshot and events to the journal
in one transaction. While that is being synced the next turn runs; the result becomes visible when
its transaction is on disk. After a crash the same turns run again from the newest snapshot, for
their effect alone.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer import operations as rows
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import Refused, TrainerError
from tinsmith_trainer.executor import Executed, Executor, SavedWeights
from tinsmith_trainer.failpoints import reach
from tinsmith_trainer.journal import FULL_RETRY_SECONDS, Journal
from tinsmith_trainer.lines import CREATES, Lines
from tinsmith_trainer.model_line import Entry, ModelLine
from tinsmith_trainer.operations import Failure, Operation, Success
from tinsmith_trainer.ordering import Turn, WindowFailure, failed_step_message, missing_failure
from tinsmith_trainer.snapshots import Snapshot, SnapshotFile, SnapshotFolder

log = structlog.get_logger(__name__)

RELEASE_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """A snapshot is due when replay after a crash would cost this much, or this many times the snapshot itself."""

    replay_seconds: float = 10.0
    times_snapshot_cost: float = 20.0


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    operations_done: int = 0
    operations_failed: int = 0
    trained_tokens: int = 0
    train_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Finding:
    """What became of one operation, to be made durable in one transaction."""

    outcome: Success | Failure
    executed: Executed | None = None
    snapshot: SnapshotFile | None = None

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None


class Scheduler:
    """Owns the engine's thread. `on_saved` is called from the journal's thread with weights that may be sampled."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        lines: Lines,
        journal: Journal,
        snapshots: SnapshotFolder,
        *,
        on_saved: Callable[[SavedWeights], None],
        policy: SnapshotPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = Counters()
        self._engine = engine
        self._executor = executor
        self._lines = lines
        self._journal = journal
        self._snapshots = snapshots
        self._on_saved = on_saved
        self._policy = policy or SnapshotPolicy()
        self._clock = clock
        self._epoch = 0
        self._snapshot_cost_seconds = 0.0
        self._corrupted: deque[str] = deque()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Takes over what the journal holds and begins to run it."""
        recovered = self._lines.recover()
        self._snapshots.keep_only(line.snapshot.name for line in recovered if line.snapshot)
        self._thread.start()

    def set_epoch(self, epoch: int) -> None:
        """Names the checkpoints and events from now on. Never moves back."""
        self._epoch = max(self._epoch, epoch)

    def stop(self) -> None:
        """Lets the running operation finish, snapshots every model, ends the thread."""
        self._lines.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        for line in self._lines.all():
            self._restore_or_corrupt(line)
        while (ready := self._lines.wait_for_turn()) is not None:
            self._drop_corrupted()
            self._take(*ready)
        self._journal.settle()  # a release that is being synced must not be snapshot again
        for line in self._lines.all():
            self._snapshot_at_stop(line)

    def _take(self, line: ModelLine, turn: Turn, entry: Entry) -> None:
        try:
            if turn.missing:
                line.window_failure = missing_failure(turn.missing)
            if entry.is_finished:
                self._replay(line, entry)
            elif not self._run(line, entry):
                self._lines.hold(line, RELEASE_RETRY_SECONDS)
                return
        except Exception as error:
            log.exception("model corrupted", model_id=line.model_id, seq_id=turn.seq_id)
            self._corrupt(line, error)
        else:
            self._lines.finish(line, turn)

    def _drop_corrupted(self) -> None:
        """Their slots are free; only this thread may touch the engine."""
        while self._corrupted:
            self._engine.drop(self._corrupted.popleft())

    # ---- recovery

    def _restore_or_corrupt(self, line: ModelLine) -> None:
        """A model that never left a snapshot starts over with its create."""
        if not line.is_open or line.snapshot is None:
            return
        try:
            snapshot = self._snapshots.read(line.snapshot)
            self._engine.load_state(line.model_id, snapshot.state, with_optimizer=True)
        except Exception as error:
            log.exception("model corrupted", model_id=line.model_id)
            self._corrupt(line, error)
            return
        line.window_failure = snapshot.window_failure
        line.rank, line.optimizer_step = snapshot.state.lora.rank, snapshot.state.optimizer_step

    def _replay(self, line: ModelLine, entry: Entry) -> None:
        """Runs again what ran before the crash, for its effect alone: its result stands."""
        operation = entry.operation
        payload = self._lines.take_payload(entry)
        if entry.failure is not None:
            self._note_failure(line, operation, payload, entry.failure)
            return
        if operation.kind not in (worker_pb2.FORWARD_BACKWARD, worker_pb2.OPTIM_STEP):
            raise AssertionError(f"operation {operation.seq_id} left no snapshot, and replay must not repeat it")
        if operation.kind == worker_pb2.OPTIM_STEP or self._executor.bears_gradient(operation, payload):
            self._execute(line, operation, payload)

    # ---- running

    def _run(self, line: ModelLine, entry: Entry) -> bool:
        """False: it must be tried again later, and nothing was decided."""
        finding = self._find(line, entry.operation, self._lines.take_payload(entry))
        if entry.operation.kind == worker_pb2.RELEASE_MODEL and finding.failure is not None:
            # Its last checkpoint did not get through, and without it the work would be lost: it keeps its slot.
            log.warning("release put off", model_id=line.model_id, reason=finding.failure.message)
            return False
        reach("executed-before-result")
        committed = self._journal.write(lambda db: self._write(db, entry.operation, finding), must_succeed=True)
        committed.add_done_callback(lambda done: self._publish(line, entry, finding, done))
        return True

    def _find(self, line: ModelLine, operation: Operation, payload: bytes) -> _Finding:
        try:
            executed = self._execute(line, operation, payload)
        except TrainerError as error:
            failure = Failure(error.category, str(error))
        except Exception as error:
            log.exception("operation failed", model_id=operation.model_id, seq_id=operation.seq_id)
            failure = Failure("server", f"{type(error).__name__}: {error}")
        else:
            return _Finding(executed.success, executed, self._snapshot_if_due(line, operation.seq_id, executed))
        self._note_failure(line, operation, payload, failure)
        return _Finding(failure)

    def _execute(self, line: ModelLine, operation: Operation, payload: bytes) -> Executed:
        if operation.rejection is not None:
            raise Refused(operation.rejection.category, operation.rejection.message)
        if operation.kind == worker_pb2.OPTIM_STEP and line.window_failure is not None:
            raise Refused(line.window_failure.category, failed_step_message(line.window_failure))
        started = time.perf_counter()
        executed = self._executor.execute(operation, payload, self._epoch, self._name_event(line.model_id))
        self._note_success(line, operation, executed, time.perf_counter() - started)
        return executed

    def _note_success(self, line: ModelLine, operation: Operation, executed: Executed, seconds: float) -> None:
        line.replay_seconds += seconds
        self.counters.train_seconds += seconds
        self.counters.trained_tokens += executed.trained_tokens
        if operation.kind == worker_pb2.OPTIM_STEP:
            line.optimizer_step += 1
        elif operation.kind == worker_pb2.LOAD_WEIGHTS:
            line.window_failure = None  # a load clears the accumulator, and with it what was wrong with it
        if executed.releases:
            self._engine.drop(line.model_id)

    def _note_failure(self, line: ModelLine, operation: Operation, payload: bytes, failure: Failure) -> None:
        """What a failed operation leaves behind, at its first run and at replay alike."""
        if line.window_failure is None and self._executor.bears_gradient(operation, payload):
            message = f"forward_backward {operation.seq_id} failed: {failure.message}"
            line.window_failure = WindowFailure(failure.category, message)
        elif operation.kind == worker_pb2.OPTIM_STEP:
            self._engine.clear_gradients(line.model_id)
            line.window_failure = None
        elif operation.kind in CREATES:
            line.reason = f"{line.model_id} could not be created: {failure.message}"
            self._engine.drop(line.model_id)

    def _name_event(self, model_id: str) -> Callable[[int, str], int]:
        def look_up(kind: int, name: str) -> int:
            self._journal.settle()  # the save just before may still be on its way to the disk
            return self._journal.read(lambda db: rows.saved_name_event(db, model_id, kind, name)).result() or 0

        return look_up

    # ---- snapshots

    def _snapshot_if_due(self, line: ModelLine, applied: int, executed: Executed) -> SnapshotFile | None:
        if executed.releases:
            return None
        if executed.forces_snapshot:
            return self._snapshot_when_there_is_room(line, applied)
        limit = max(self._policy.replay_seconds, self._policy.times_snapshot_cost * self._snapshot_cost_seconds)
        return self._try_snapshot(line, applied) if line.replay_seconds > limit else None

    def _snapshot_when_there_is_room(self, line: ModelLine, applied: int) -> SnapshotFile:
        """The operation has had its effect, and its result may only be seen with the snapshot: so it waits."""
        while True:
            try:
                return self._write_snapshot(line, applied)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.warning("waiting for room for a snapshot", model_id=line.model_id)
                time.sleep(FULL_RETRY_SECONDS)

    def _try_snapshot(self, line: ModelLine, applied: int) -> SnapshotFile | None:
        """Only shortens a replay: without it the journal keeps its inputs."""
        try:
            return self._write_snapshot(line, applied)
        except OSError as error:
            log.warning("no snapshot", model_id=line.model_id, error=str(error))
            return None

    def _write_snapshot(self, line: ModelLine, applied: int) -> SnapshotFile:
        started = time.perf_counter()
        state = self._engine.state(line.model_id)
        file = self._snapshots.write(Snapshot(line.model_id, applied, state, line.window_failure))
        self._snapshot_cost_seconds = time.perf_counter() - started
        line.rank, line.optimizer_step = state.lora.rank, state.optimizer_step
        line.replay_seconds = 0.0
        return file

    def _snapshot_at_stop(self, line: ModelLine) -> None:
        """Saves the next start a replay; nothing depends on it."""
        applied = line.order.applied
        if not line.is_open or applied <= line.snapshot_applied:
            return
        file = self._try_snapshot(line, applied)
        if file is None:
            return
        recorded = self._journal.write(
            lambda db: rows.record_snapshot(db, line.model_id, applied, file.name, file.digest), must_succeed=True
        )
        recorded.result()
        self._replace_snapshot(line, file, applied)

    # ---- in the journal's thread

    def _write(self, db: rows.Database, operation: Operation, finding: _Finding) -> None:
        model_id = operation.model_id
        rows.record_outcome(db, model_id, operation.seq_id, finding.outcome, self._clock())
        if finding.snapshot is not None:
            rows.record_snapshot(db, model_id, operation.seq_id, finding.snapshot.name, finding.snapshot.digest)
        if operation.kind in CREATES:
            failure = finding.failure
            rows.set_model_phase(db, model_id, "released" if failure else "live", failure.message if failure else "")
        if finding.executed is not None:
            self._write_executed(db, model_id, finding.executed)
        reach("result-before-sync")

    def _write_executed(self, db: rows.Database, model_id: str, executed: Executed) -> None:
        for event in executed.events:
            event_id = rows.add_event(db, self._stamped(event))
            if executed.saved_name is not None and event.HasField("checkpoint_saved"):
                rows.note_saved_name(db, model_id, *executed.saved_name, event_id)
        if executed.releases:
            rows.forget_model(db, model_id)

    def _stamped(self, event: worker_pb2.Event) -> Callable[[int], bytes]:
        def stamp(event_id: int) -> bytes:
            stamped = worker_pb2.Event(event_id=event_id, epoch=self._epoch, time=self._clock())
            stamped.MergeFrom(event)
            return stamped.SerializeToString()

        return stamp

    def _publish(self, line: ModelLine, entry: Entry, finding: _Finding, done: Future[None]) -> None:
        reach("result-before-visible")
        if (error := done.exception()) is not None:
            self._corrupt(line, error)
            return
        failure, executed = finding.failure, finding.executed
        self.counters.operations_failed += failure is not None
        self.counters.operations_done += failure is None
        if finding.snapshot is not None:
            self._replace_snapshot(line, finding.snapshot, entry.operation.seq_id)
        if executed is not None and executed.saved is not None:
            self._on_saved(executed.saved)
        if executed is not None and executed.releases:
            self._replace_snapshot(line, None, entry.operation.seq_id)
            self._lines.close_model(line, "released")
        self._lines.publish(line, entry, failure)

    def _replace_snapshot(self, line: ModelLine, file: SnapshotFile | None, applied: int) -> None:
        old, line.snapshot = line.snapshot, file
        line.snapshot_applied, line.snapshot_at = applied, self._clock()
        if old is not None and (file is None or old.name != file.name):
            self._snapshots.remove(old.name)

    def _corrupt(self, line: ModelLine, error: BaseException) -> None:
        """Replay or the volume failed this model; the others go on."""
        reason = str(error) or type(error).__name__
        event = worker_pb2.Event(model_corrupted=worker_pb2.ModelCorrupted(model_id=line.model_id, reason=reason))

        def write(db: rows.Database) -> None:
            rows.set_model_phase(db, line.model_id, "corrupted", reason)
            rows.add_event(db, self._stamped(event))

        self._journal.write(write, must_succeed=True)
        self._corrupted.append(line.model_id)
        self._lines.close_model(line, "corrupted", reason)
