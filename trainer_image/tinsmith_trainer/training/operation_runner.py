"""The run of one operation, from the first turn to the published result.

When an operation has ended, one transaction writes the result, the snapshot and the events to the journal. The next
turn runs while this transaction is synced. Clients see the result when the result is on disk. After a crash, operations
run again from the newest snapshot, only for the effect on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import Failure, JournalFull, Refused
from tinsmith_trainer.oplog.attempts import Attempts, reason_to_wait
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import CREATES, Database, Operation, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.oplog.ordering import Turn, failed_step_message, missing_failure
from tinsmith_trainer.oplog.result_tables import Stamp, write_operation_result
from tinsmith_trainer.process.exit import fatal_callback, fatal_on_error
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import EngineCall
from tinsmith_trainer.training.co_batching import CoBatcher
from tinsmith_trainer.training.executor import Executor, release_reason, save_request
from tinsmith_trainer.training.fair_shares import Pace
from tinsmith_trainer.training.loading import Loads
from tinsmith_trainer.training.parking import Parking
from tinsmith_trainer.training.retries import Retries, Retry
from tinsmith_trainer.training.saving import Saves
from tinsmith_trainer.training.snapshotting import ModelSnapshots
from tinsmith_trainer.training.training_calls import TrainingCalls

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a turn after which the operation has ended. `result` is for the journal.

    After a replay, `result` is None, because the journal has the result already.
    """

    result: OperationResult | None


@dataclass(frozen=True, slots=True)
class Yielded:
    """The result of a turn after which the operation continues: in a later turn, or when a save is written."""


Outcome = Done | Yielded | Retry


@dataclass(slots=True)
class Counters:
    """Counters since the start of the process."""

    operations_done: int = 0
    operations_failed: int = 0
    operations_given_up: int = 0
    operations_replayed: int = 0
    optimizer_steps: int = 0
    trained_tokens: int = 0
    train_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tools:
    """The objects that an operation uses while it runs."""

    engine: Engine
    executor: Executor
    calls: TrainingCalls
    co_batcher: CoBatcher
    pace: Pace
    saves: Saves
    loads: Loads
    snapshots: ModelSnapshots
    parking: Parking
    retries: Retries
    attempts: Attempts
    engine_call: EngineCall


class OperationRunner:
    """The run of operations. Used by the engine's thread only; the journal's thread publishes results.

    `on_result` is called once for each result, in the journal's thread, when the result is on disk.
    """

    def __init__(
        self,
        tools: Tools,
        queues: ModelQueues,
        journal: Journal,
        stamp: Callable[[], Stamp],
        on_result: Callable[[ModelQueue, Entry, OperationResult], None],
    ) -> None:
        self.counters = Counters()
        self._tools = tools
        self._queues = queues
        self._journal = journal
        self._stamp = stamp
        self._on_result = on_result

    def run(self, queue: ModelQueue, turn: Turn, entry: Entry) -> None:
        """Run one turn of the model's next operation."""
        try:
            if turn.missing:
                queue.window_failure = missing_failure(turn.missing)
            match self._attempt(queue, entry):
                case Done(result):
                    self._conclude(queue, turn, entry, result)
                case Retry(None, reason):
                    self._queues.quarantine(queue, reason)
                case Retry(float(seconds), reason):
                    self._queues.hold(queue, seconds, reason)
        except Exception:
            # In memory the model is now between two operations. The next process starts from the state in the journal.
            # It counts this end as an end at the operation, so that not every process ends at the same operation.
            with self._tools.engine_call.at(entry.work), fatal_on_error("the operation could not be finished"):
                raise

    def end_save(self, queue: ModelQueue) -> None:
        """Finish the model's save if the checkpoint is written. Call this between two turns."""
        if self._tools.saves.is_written(queue):
            self._queues.hold(queue, 0.0)
            turn = queue.order.next_turn()
            assert turn is not None, f"nothing of {queue.model_id} has waited for its save"
            self.run(queue, turn, queue.entries[turn.seq_id])

    def _attempt(self, queue: ModelQueue, entry: Entry) -> Outcome:
        refusal = self._tools.attempts.refusal(entry.work, entry.operation)
        if refusal is None:
            return self._replay(queue, entry) if entry.is_finished else self._run(queue, entry)
        if refusal.fails:
            return Done(self._give_up(queue, entry, refusal.message))
        return Retry(None, refusal.message)

    def _give_up(self, queue: ModelQueue, entry: Entry, message: str) -> OperationResult:
        """Fail an operation without reading the body, because the body may have caused the earlier ends of processes.

        The operation counts as a lost gradient.
        """
        self.counters.operations_given_up += 1
        log.error("operation given up", model_id=queue.model_id, seq_id=entry.work.seq_id, reason=message)
        return replace(self._failed(queue, entry, Failure("server", message)), given_up=True)

    def _replay(self, queue: ModelQueue, entry: Entry) -> Outcome:
        """Run an operation from before the crash again, only for the effect on the model."""
        operation = entry.operation
        if entry.failure is not None:
            self._note_failure(queue, entry, entry.failure)
            return Done(None)
        if operation.kind == worker_pb2.SAVE_WEIGHTS:
            return Done(None)  # the save's files are on the checkpoint root, and a save does not change the adapter
        if operation.kind not in (worker_pb2.FORWARD_BACKWARD, worker_pb2.OPTIM_STEP):
            raise AssertionError(f"operation {operation.seq_id} left no snapshot, and replay must not repeat it")
        if operation.is_forward_backward and not entry.may_bear_a_gradient:
            return Done(None)
        try:
            outcome = self._execute(queue, entry)
        except Exception as error:  # the operation ran once before, so this node or its memory is the cause
            log.exception("operation not replayed", model_id=queue.model_id, seq_id=operation.seq_id)
            return Retry(None, reason_to_wait(entry.work, operation, error))
        if isinstance(outcome, Yielded):
            return outcome
        self._tools.attempts.succeeded(entry.work)
        self.counters.operations_replayed += 1
        return Done(None)

    def _run(self, queue: ModelQueue, entry: Entry) -> Outcome:
        window_failure = queue.window_failure
        outcome = self._execute_or_fail(queue, entry)
        if not isinstance(outcome, OperationResult):
            return outcome
        try:
            snapshot = self._tools.snapshots.for_result(queue, entry.work, outcome)
        except JournalFull as error:
            retry = self._tools.retries.undo(queue, entry.operation, outcome, error)
            queue.window_failure = window_failure
            return retry
        ended_at = self._stamp().time
        return Done(replace(outcome, snapshot=snapshot, started_at=entry.started_at, ended_at=ended_at, replaced=None))

    def _execute_or_fail(self, queue: ModelQueue, entry: Entry) -> OperationResult | Yielded | Retry:
        """Run the operation. If the operation fails, return the failure as a result.

        The error object is not kept, because an error keeps stack frames and all data in these frames.
        """
        try:
            return self._execute(queue, entry)
        except Exception as error:
            decision = self._tools.retries.after(queue, entry.operation, error)
        return decision if isinstance(decision, Retry) else self._failed(queue, entry, decision)

    def _execute(self, queue: ModelQueue, entry: Entry) -> OperationResult | Yielded:
        operation = entry.operation
        entry.started_at = entry.started_at or self._stamp().time
        if operation.rejection is not None:
            raise Refused(operation.rejection.category, operation.rejection.message)
        if operation.kind == worker_pb2.OPTIM_STEP and queue.window_failure is not None:
            raise Refused(queue.window_failure.category, failed_step_message(queue.window_failure))
        if operation.is_forward_backward:
            return self._advance(queue, entry)
        started = self._tools.engine.clock_seconds()
        result = self._tools.saves.outcome(queue)
        if result is None:
            with self._tools.engine_call.at(entry.work):
                result = self._execute_at_once(queue, entry)
        if result is None:
            return Yielded()
        seconds = self._tools.engine.clock_seconds() - started
        self._note_success(queue, operation, result, seconds)
        return replace(result, seconds=seconds)

    def _advance(self, queue: ModelQueue, entry: Entry) -> OperationResult | Yielded:
        """Compute the next microbatch of a training call. After the last microbatch, finish the call."""
        tools = self._tools
        call = tools.calls.take(queue.model_id) or tools.co_batcher.begin(queue, entry)
        if call.on_engine.next_tokens:
            tools.co_batcher.compute(call)
        if call.on_engine.next_tokens:
            tools.calls.keep(call)
            return Yielded()
        started = tools.engine.clock_seconds()
        with tools.engine_call.at(entry.work):
            result = tools.calls.finish(call)
        seconds = tools.engine.clock_seconds() - started
        tools.pace.note(0, seconds)  # calls that are not divided are computed here
        self._note_success(queue, entry.operation, result, call.seconds + seconds)
        return replace(result, seconds=call.seconds + seconds)

    def _execute_at_once(self, queue: ModelQueue, entry: Entry) -> OperationResult | None:
        """Run an operation that is not a training call. Return None for a save that is in progress or that waits."""
        operation, executor = entry.operation, self._tools.executor
        if (read := self._tools.loads.outcome(queue, entry)) is not None:
            return executor.load(operation.model_id, *read)
        payload = self._queues.take_payload(entry)
        request = save_request(operation, payload)
        if request is None:
            return executor.execute(operation, payload)
        return self._save(queue, entry, request, release_reason(operation, payload))

    def _save(
        self, queue: ModelQueue, entry: Entry, request: worker_pb2.SaveWeights, releases: str | None
    ) -> OperationResult | None:
        saves, epoch = self._tools.saves, self._stamp().epoch
        if self._tools.attempts.is_suspect(entry.work):
            return saves.write_alone(queue, entry, request, epoch, releases)
        written = saves.begin(queue, entry, request, epoch, releases)
        if written is not None:
            end = partial(self.end_save, queue)
            written.add_done_callback(
                fatal_callback("a save could not be concluded", lambda _: self._queues.between_turns(end))
            )
        return None

    # ---- effects

    def _failed(self, queue: ModelQueue, entry: Entry, failure: Failure) -> OperationResult:
        self._note_failure(queue, entry, failure)
        forward_only = not entry.may_bear_a_gradient if entry.operation.is_forward_backward else None
        events = (_not_created(queue.model_id, failure),) if entry.operation.kind in CREATES else ()
        return OperationResult(failure=failure, forward_only=forward_only, events=events)

    def _note_success(self, queue: ModelQueue, operation: Operation, result: OperationResult, seconds: float) -> None:
        queue.replay_seconds += seconds if operation.changes_the_adapter else 0.0
        self.counters.train_seconds += seconds
        self.counters.trained_tokens += result.trained_tokens
        if operation.kind == worker_pb2.OPTIM_STEP:
            queue.optimizer_step += 1
        elif operation.kind == worker_pb2.LOAD_WEIGHTS:
            queue.window_failure = None  # a load clears the accumulator, and so the failed gradient in it
        if result.releases is not None:
            self._tools.parking.free(queue)

    def _note_failure(self, queue: ModelQueue, entry: Entry, failure: Failure) -> None:
        """Apply the effect of a failed operation, both in the first run and in a replay."""
        operation = entry.operation
        if queue.window_failure is None and entry.may_bear_a_gradient:
            message = f"forward_backward {queue.known_as(operation)} failed: {failure.message}"
            queue.window_failure = Failure(failure.category, message)
        elif operation.kind == worker_pb2.OPTIM_STEP:
            self._tools.engine.clear_gradients(queue.model_id)
            queue.window_failure = None
        elif operation.kind in CREATES:
            queue.reason = f"{queue.model_id} could not be created: {failure.message}"
            self._tools.parking.free(queue)

    # ---- results

    def _conclude(self, queue: ModelQueue, turn: Turn, entry: Entry, result: OperationResult | None) -> None:
        queue.retried_since, queue.undone_seconds, queue.held_because = None, 0.0, ""
        if turn.missing or entry.operation.changes_the_adapter:
            queue.changed_at = turn.seq_id
        # The order continues before a client can see the result and send the next operation.
        self._queues.finish(queue, turn)
        if result is not None:
            reach("executed-before-result")
            self._write_result(queue, entry, result)

    def _write_result(self, queue: ModelQueue, entry: Entry, result: OperationResult) -> None:
        committed = self._journal.write(
            partial(self._write, operation=entry.operation, result=result), must_succeed=True, model_id=queue.model_id
        )
        publish = partial(self._publish, queue, entry, result)
        committed.add_done_callback(fatal_callback("a result could not be published", publish))

    def _write(self, db: Database, operation: Operation, result: OperationResult) -> None:
        write_operation_result(db, operation, result, self._stamp())
        reach("result-before-sync")

    def _publish(self, queue: ModelQueue, entry: Entry, result: OperationResult, _: Future[None]) -> None:
        reach("result-before-visible")
        self.counters.operations_failed += result.failure is not None
        self.counters.operations_done += result.failure is None
        self.counters.optimizer_steps += result.step is not None
        if result.snapshot is not None:
            self._tools.snapshots.replace(queue, result.snapshot, entry.operation.seq_id)
        self._on_result(queue, entry, result)
        if result.releases is not None:
            self._tools.snapshots.replace(queue, None, entry.operation.seq_id)
            self._queues.close_model(queue, "released", result.releases)
        self._queues.publish(queue, entry, result.failure)


def _not_created(model_id: str, failure: Failure) -> worker_pb2.Event:
    category = worker_pb2.USER if failure.category == "user" else worker_pb2.SERVER
    told = worker_pb2.Failure(category=category, message=failure.message)
    return worker_pb2.Event(model_failed=worker_pb2.ModelFailed(model_id=model_id, failure=told))
