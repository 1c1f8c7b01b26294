"""Runs accepted operations on the engine: each model's in order, tenants and models in turn, results durable first.

A turn of the engine's thread is a microbatch, beside which those of other models may be computed, or an operation
that has none; of a save it is the copy alone. When an operation has ended, its outcome, snapshot and events go to the
journal in one transaction. While that is being synced the next turn runs; the result becomes visible when its
transaction is on disk. After a crash the same operations run again from the newest snapshot, for their effect alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import Failure, JournalFull, Refused
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.attempts import AttemptPolicy, Attempts, reason_to_wait
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import CREATES, Operation, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues, Ready
from tinsmith_trainer.oplog.ordering import Turn, failed_step_message, missing_failure
from tinsmith_trainer.oplog.result_tables import Stamp, write_operation_result
from tinsmith_trainer.process.exit import fatal_callback, fatal_on_error
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import EngineCall, InFlightMarker
from tinsmith_trainer.training.co_batching import Company
from tinsmith_trainer.training.executor import Executor, release_reason, save_request
from tinsmith_trainer.training.fair_shares import Pace, Turns
from tinsmith_trainer.training.importing import Imports
from tinsmith_trainer.training.loading import Loads
from tinsmith_trainer.training.parking import Parking
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.training.restoring import Restorer, recover_corrupted
from tinsmith_trainer.training.retries import PutOff, failure_of
from tinsmith_trainer.training.saving import Saves
from tinsmith_trainer.training.snapshotting import ModelSnapshots, SnapshotPolicy, Snapshotter
from tinsmith_trainer.training.training_calls import CallsInProgress

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    operations_done: int = 0
    operations_failed: int = 0
    operations_given_up: int = 0
    trained_tokens: int = 0
    train_seconds: float = 0.0


class _NotNow(Exception):
    """Nothing was decided of an operation: its model waits, or has had its turn."""


class Scheduler:
    """Owns the engine's thread. `on_result` is called from the journal's thread, once a result, when it is on disk."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        queues: ModelQueues,
        journal: Journal,
        snapshots: SnapshotFolder,
        *,
        on_result: Callable[[ModelQueue, OperationResult], None],
        marker: InFlightMarker,
        policy: SnapshotPolicy | None = None,
        attempts: AttemptPolicy | None = None,
        residency: ResidencyRules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = Counters()
        self.engine_call = EngineCall(marker)
        self._attempt_policy = attempts or AttemptPolicy()
        self._attempts = Attempts(journal, marker, self._attempt_policy.limit)
        self._engine = engine
        self._executor = executor
        self._queues = queues
        self._journal = journal
        self._snapshots = snapshots
        self._on_result = on_result
        self._clock = clock
        self._model_snapshots = ModelSnapshots(
            Snapshotter(engine, snapshots, self.engine_call, self._attempts, policy or SnapshotPolicy(), clock),
            queues,
            journal,
            snapshots,
            clock,
        )
        self._turns = Turns()
        self._pace = Pace()
        self._calls = CallsInProgress()
        self._company = Company(
            executor, self._calls, queues.take_payload, self._attempts, self.engine_call, self._pace
        )
        self._saves = Saves(executor, queues, journal, self._attempts, self.engine_call.marker, self._take_next)
        self._loads = Loads(executor.read, queues, self._attempts, self.engine_call.marker)
        self.imports = Imports(executor, queues, self._attempts, self.engine_call.marker)
        self._attempts.before_a_suspect += [self._saves.wait, self._loads.wait, self.imports.wait]
        restorer = Restorer(engine, snapshots, queues, journal, self._attempts, self.engine_call, self._stamp)
        self.parking = Parking(
            *(engine, queues, self._model_snapshots, restorer),
            at_work=(self._calls, self._saves),
            rules=residency or ResidencyRules(),
        )
        self._put_off = PutOff(engine, queues, self.parking, self._model_snapshots)
        self._epoch = 0
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Takes over what the journal holds and begins to run it. Raises JournalFull, and may then be tried again."""
        with fatal_on_error("the journal could not be taken over", unless=(JournalFull,)):
            self._attempts.recover()
            recover_corrupted(self._journal, self._snapshots, self._clock())
            self._queues.recover()
            self._model_snapshots.take_over()
            self._thread.start()

    @property
    def last_snapshot_time(self) -> float:
        """Unix seconds; 0: there is none."""
        return self._model_snapshots.last_time

    def snapshot_soon(self) -> Future[float]:
        """See `ModelSnapshots.soon`."""
        return self._model_snapshots.soon()

    def running_seconds(self) -> float:
        """How long the engine's call, or a save or an import beside it, has run; 0: nothing runs."""
        return max(at.running_seconds() for at in (self.engine_call, self._saves, self.imports))

    def set_epoch(self, epoch: int) -> None:
        """Names the checkpoints and events from now on. Never moves back."""
        self._epoch = max(self._epoch, epoch)

    def told_to_stop(self) -> None:
        """Whatever ends the process from now on, the call that runs is not to blame, unless it hangs."""
        if self.engine_call.told_to_stop(self._attempt_policy.hang_seconds, self.running_seconds()):
            self._attempts.forget_all()

    def stop(self) -> None:
        """Lets the turn that runs end, snapshots every model, ends the thread."""
        self._queues.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.imports.end_all()

    def _serve(self) -> None:
        with fatal_on_error("the engine's thread failed"):
            self._run_all()

    def _run_all(self) -> None:
        self.parking.at_start(self._queues.open())
        while (ready := self._queues.wait_for_turns(self.parking)) is not None:
            if callable(ready):
                ready()
            else:
                self._take_one_of(ready)
        self._calls.drop_all()
        self._model_snapshots.at_stop()
        self._saves.end_all()  # last, since a storage may keep it waiting until the process is killed

    def _take_one_of(self, ready: Sequence[Ready]) -> None:
        by_model = {one[0].model_id: one for one in ready}
        self._calls.keep_only(by_model)
        contenders = {contender.model_id: contender for contender in self._calls.contenders(ready)}
        chosen = self._turns.next(list(contenders.values()))
        if self._calls.has_others_than(chosen.model_id):
            reach("operation-preempted")
        started = time.perf_counter()
        queue, turn, entry = by_model[chosen.model_id]
        if any(wait(queue, entry) for wait in (self._saves.must_wait, self._put_off.until_room, self._loads.must_wait)):
            return
        is_there, brought = self.parking.bring(queue, entry), time.perf_counter()
        along = (by_model[one.model_id] for one in self._turns.who_may_go_along(chosen, contenders.values()))
        self._company.invite([other for other in along if self.parking.holds(other[0])])
        if is_there:
            self._take(queue, turn, entry)
            self.parking.used(queue)
        computed = self._company.computed
        # What is done around a microbatch is not charged: on a busy machine those seconds are another program's.
        seconds = (brought if computed else time.perf_counter()) - started
        self._turns.charge(chosen, computed.pop(chosen.model_id, 0) + self._pace.worth(seconds))
        for model_id, tokens in computed.items():
            self._turns.charge(contenders[model_id], tokens)
            self._end_if_computed(*by_model[model_id])
        for model_id, tokens in self._company.read.items():
            self._turns.charge(contenders[model_id], tokens)

    def _end_if_computed(self, queue: ModelQueue, turn: Turn, entry: Entry) -> None:
        """Of one that went along: its client need not wait for a turn of its own."""
        self.parking.used(queue)
        call = self._calls.find(queue.model_id)
        if call is not None and not call.training.next_tokens:
            self._take(queue, turn, entry)

    def _take_next(self, queue: ModelQueue) -> None:
        turn = queue.order.next_turn()
        assert turn is not None, f"nothing of {queue.model_id} has waited for its save"
        self._take(queue, turn, queue.entries[turn.seq_id])

    def _take(self, queue: ModelQueue, turn: Turn, entry: Entry) -> None:
        try:
            if turn.missing:
                queue.window_failure = missing_failure(turn.missing)
            result = self._decide(queue, entry)
            queue.retried_since, queue.undone_seconds, queue.held_because = None, 0.0, ""
            if turn.missing or entry.operation.changes_the_adapter:
                queue.changed_at = turn.seq_id
            # Before anybody can hear of the result, and ask for what comes after it.
            self._queues.finish(queue, turn)
            if result is not None:
                reach("executed-before-result")
                self._write_result(queue, entry, result)
        except _NotNow:
            return
        except Exception:
            # In memory the model is somewhere between two operations. The next process finds it where the journal says,
            # and counts this end as one at the operation, so that not every process ends there.
            with self.engine_call.at(entry.work), fatal_on_error("the operation could not be finished"):
                raise

    def _decide(self, queue: ModelQueue, entry: Entry) -> OperationResult | None:
        """None: its result stands. Raises _NotNow."""
        verdict = self._attempts.verdict(entry.work, entry.operation)
        if verdict == "quarantine":
            self._queues.quarantine(queue, self._attempts.quarantine_reason(entry.work, entry.operation))
            raise _NotNow
        if verdict == "fail":
            return self._give_up(queue, entry)
        if entry.is_finished:
            self._replay(queue, entry)
            return None
        return self._run(queue, entry)

    # ---- replay

    def _replay(self, queue: ModelQueue, entry: Entry) -> None:
        """Runs again what ran before the crash, for its effect alone. Raises _NotNow."""
        operation = entry.operation
        if entry.failure is not None:
            self._note_failure(queue, entry, entry.failure)
            return
        if operation.kind == worker_pb2.SAVE_WEIGHTS:
            return  # its files are on the checkpoint root, and the adapter is as it was before
        if operation.kind not in (worker_pb2.FORWARD_BACKWARD, worker_pb2.OPTIM_STEP):
            raise AssertionError(f"operation {operation.seq_id} left no snapshot, and replay must not repeat it")
        if operation.kind == worker_pb2.OPTIM_STEP or entry.may_bear_a_gradient:
            try:
                self._execute(queue, entry)
            except _NotNow:
                raise
            except Exception as error:  # it ran once: what has changed is the place
                log.exception("operation not replayed", model_id=queue.model_id, seq_id=operation.seq_id)
                self._queues.quarantine(queue, reason_to_wait(entry.work, operation, error))
                raise _NotNow from error
            self._attempts.succeeded(entry.work)

    # ---- running

    def _write_result(self, queue: ModelQueue, entry: Entry, result: OperationResult) -> None:
        committed = self._journal.write(
            lambda db: self._write(db, entry.operation, result), must_succeed=True, model_id=queue.model_id
        )
        publish = partial(self._publish, queue, entry, result)
        committed.add_done_callback(fatal_callback("a result could not be published", publish))

    def _run(self, queue: ModelQueue, entry: Entry) -> OperationResult:
        """Raises _NotNow where it gives way, or is put off."""
        window_failure = queue.window_failure
        outcome = self._outcome(queue, entry)
        if isinstance(outcome, Failure):
            outcome = self._failed(queue, entry, outcome)
        try:
            snapshot = self._model_snapshots.for_result(queue, entry.work, outcome)
        except JournalFull as error:
            self._put_off.undo(queue, entry.operation, outcome, error)
            queue.window_failure = window_failure
            raise _NotNow from error
        return replace(outcome, snapshot=snapshot, started_at=entry.started_at, replaced=None)

    def _outcome(self, queue: ModelQueue, entry: Entry) -> OperationResult | Failure:
        """Returns the failure as words, since an error keeps its frames, and they what was read. Raises _NotNow."""
        try:
            return self._execute(queue, entry)
        except _NotNow:
            raise
        except Exception as error:
            if self._put_off.after(queue, entry.operation, error):
                raise _NotNow from error
            return failure_of(entry.operation, error)

    def _give_up(self, queue: ModelQueue, entry: Entry) -> OperationResult:
        """Its body is read no more, since reading may be what ends processes: it counts as a gradient that is lost."""
        self.counters.operations_given_up += 1
        failure = Failure("server", self._attempts.failure_message(entry.operation))
        log.error("operation given up", model_id=queue.model_id, seq_id=entry.work.seq_id, reason=failure.message)
        return replace(self._failed(queue, entry, failure), given_up=True)

    def _failed(self, queue: ModelQueue, entry: Entry, failure: Failure) -> OperationResult:
        self._note_failure(queue, entry, failure)
        forward_only = not entry.may_bear_a_gradient if entry.operation.is_forward_backward else None
        return OperationResult(failure=failure, forward_only=forward_only)

    def _execute(self, queue: ModelQueue, entry: Entry) -> OperationResult:
        """Raises _NotNow where it gives way."""
        operation = entry.operation
        entry.started_at = entry.started_at or self._clock()
        if operation.rejection is not None:
            raise Refused(operation.rejection.category, operation.rejection.message)
        if operation.kind == worker_pb2.OPTIM_STEP and queue.window_failure is not None:
            raise Refused(queue.window_failure.category, failed_step_message(queue.window_failure))
        if operation.is_forward_backward:
            return self._advance(queue, entry)
        started = time.perf_counter()
        result = self._saves.outcome(queue)
        if result is None:
            with self.engine_call.at(entry.work):
                result = self._execute_at_once(queue, entry)
        self._note_success(queue, operation, result, time.perf_counter() - started)
        return result

    def _execute_at_once(self, queue: ModelQueue, entry: Entry) -> OperationResult:
        """Raises _NotNow where it is a save, which is written from now on."""
        operation = entry.operation
        if (read := self._loads.outcome(queue, entry)) is not None:
            return self._executor.load(operation.model_id, *read)
        payload = self._queues.take_payload(entry)
        request, releases = save_request(operation, payload), release_reason(operation, payload)
        if request is None:
            return self._executor.execute(operation, payload)
        if (result := self._saves.run(queue, entry, request, self._epoch, releases)) is None:
            raise _NotNow
        return result

    def _advance(self, queue: ModelQueue, entry: Entry) -> OperationResult:
        """Its next microbatch. Raises _NotNow unless that was the last: whose turn is next is open."""
        call = self._calls.take(queue.model_id) or self._company.begin(queue, entry)
        if call.training.next_tokens:
            self._company.compute(call)
        if call.training.next_tokens:
            self._calls.give_back(call)
            raise _NotNow
        started = time.perf_counter()
        with self.engine_call.at(entry.work):
            result = self._executor.finish(call.training)
        seconds = time.perf_counter() - started
        self._pace.note(0, seconds)  # where calls are not divided, this is when they are computed
        self._note_success(queue, entry.operation, result, call.seconds + seconds)
        return result

    def _note_success(self, queue: ModelQueue, operation: Operation, result: OperationResult, seconds: float) -> None:
        queue.replay_seconds += seconds if operation.changes_the_adapter else 0.0
        self.counters.train_seconds += seconds
        self.counters.trained_tokens += result.trained_tokens
        if operation.kind == worker_pb2.OPTIM_STEP:
            queue.optimizer_step += 1
        elif operation.kind == worker_pb2.LOAD_WEIGHTS:
            queue.window_failure = None  # a load clears the accumulator, and with it what was wrong with it
        if result.releases is not None:
            self.parking.free(queue)

    def _note_failure(self, queue: ModelQueue, entry: Entry, failure: Failure) -> None:
        """What a failed operation leaves behind, at its first run and at replay alike."""
        operation = entry.operation
        if queue.window_failure is None and entry.may_bear_a_gradient:
            message = f"forward_backward {operation.seq_id} failed: {failure.message}"
            queue.window_failure = Failure(failure.category, message)
        elif operation.kind == worker_pb2.OPTIM_STEP:
            self._engine.clear_gradients(queue.model_id)
            queue.window_failure = None
        elif operation.kind in CREATES:
            queue.reason = f"{queue.model_id} could not be created: {failure.message}"
            self.parking.free(queue)

    # ---- in the journal's thread

    def _write(self, db: journal_tables.Database, operation: Operation, result: OperationResult) -> None:
        write_operation_result(db, operation, result, self._stamp())
        reach("result-before-sync")

    def _stamp(self) -> Stamp:
        return Stamp(self._epoch, self._clock())

    def _publish(self, queue: ModelQueue, entry: Entry, result: OperationResult, _: Future[None]) -> None:
        reach("result-before-visible")
        self.counters.operations_failed += result.failure is not None
        self.counters.operations_done += result.failure is None
        if result.snapshot is not None:
            self._model_snapshots.replace(queue, result.snapshot, entry.operation.seq_id)
        self._on_result(queue, result)
        if result.releases is not None:
            self._model_snapshots.replace(queue, None, entry.operation.seq_id)
            self._queues.close_model(queue, "released", result.releases)
        self._queues.publish(queue, entry, result.failure)
