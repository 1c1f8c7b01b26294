"""The choice of turns on the engine's thread. Operations of a model run in order; models and tenants have fair shares.

A turn is a microbatch, or an operation without microbatches. The forward of a microbatch may also compute microbatches
of other models. A turn of a save consists only of the copy. `OperationRunner` runs the turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog.attempts import AttemptPolicy, Attempts
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues, Ready
from tinsmith_trainer.oplog.ordering import Turn
from tinsmith_trainer.oplog.result_tables import Stamp
from tinsmith_trainer.process.exit import fatal_on_error
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import EngineCall, InFlightMarker
from tinsmith_trainer.training.co_batching import CoBatcher
from tinsmith_trainer.training.executor import Executor
from tinsmith_trainer.training.fair_shares import Contender, FairShares, Pace
from tinsmith_trainer.training.importing import Imports
from tinsmith_trainer.training.loading import Loads
from tinsmith_trainer.training.operation_runner import Counters, OperationRunner, Tools
from tinsmith_trainer.training.parking import Parking
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.training.restoring import Restorer, recover_corrupted
from tinsmith_trainer.training.retries import Retries
from tinsmith_trainer.training.saving import Saves
from tinsmith_trainer.training.snapshotting import ModelSnapshots, SnapshotPolicy, Snapshotter
from tinsmith_trainer.training.training_calls import TrainingCalls


class Scheduler:
    """The owner of the engine's thread. The journal's thread calls `on_result` once for each result that is on disk."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        queues: ModelQueues,
        journal: Journal,
        snapshots: SnapshotFolder,
        *,
        on_result: Callable[[ModelQueue, Entry, OperationResult], None],
        marker: InFlightMarker,
        policy: SnapshotPolicy | None = None,
        attempts: AttemptPolicy | None = None,
        residency: ResidencyRules | None = None,
        reports_co_batching: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self.engine_call = EngineCall(marker)
        self.training_calls = TrainingCalls(engine, reports_co_batching=reports_co_batching)
        self._attempt_policy = attempts or AttemptPolicy()
        self._attempts = Attempts(journal, marker, self._attempt_policy.limit)
        self._queues = queues
        self._journal = journal
        self._snapshots = snapshots
        self._clock = clock
        self._epoch = 0
        self._shares = FairShares()
        self._pace = Pace()
        self._co_batcher = CoBatcher(
            engine, self.training_calls, queues.take_payload, self._attempts, self.engine_call, self._pace
        )
        self._saves = Saves(executor, queues, journal, self._attempts, marker)
        self._loads = Loads(executor.read, queues, self._attempts, marker)
        self.imports = Imports(executor, queues, self._attempts, marker)
        self._attempts.before_a_suspect += [self._saves.wait, self._loads.wait, self.imports.wait]
        snapshotter = Snapshotter(
            engine, snapshots, self.engine_call, self._attempts, policy or SnapshotPolicy(), clock
        )
        self._model_snapshots = ModelSnapshots(snapshotter, queues, journal, snapshots, clock)
        self.parking = Parking(
            engine,
            queues,
            self._model_snapshots,
            Restorer(engine, snapshots, queues, journal, self._attempts, self.engine_call, self._stamp),
            active=(self.training_calls, self._saves),
            rules=residency or ResidencyRules(),
        )
        self._retries = Retries(engine, queues, self.parking, self._model_snapshots)
        tools = Tools(
            engine=engine,
            executor=executor,
            calls=self.training_calls,
            co_batcher=self._co_batcher,
            pace=self._pace,
            saves=self._saves,
            loads=self._loads,
            snapshots=self._model_snapshots,
            parking=self.parking,
            retries=self._retries,
            attempts=self._attempts,
            engine_call=self.engine_call,
        )
        self._runner = OperationRunner(tools, queues, journal, self._stamp, on_result)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    # ---- from other threads

    def start(self) -> None:
        """Read the operations in the journal, and begin to run operations.

        After JournalFull, `start` may be called again.
        """
        with fatal_on_error("the journal could not be taken over", unless=(JournalFull,)):
            self._attempts.recover()
            recover_corrupted(self._journal, self._snapshots, self._clock())
            self._queues.recover()
            self._model_snapshots.take_over()
            self._thread.start()

    @property
    def counters(self) -> Counters:
        return self._runner.counters

    @property
    def last_snapshot_time(self) -> float:
        """The time of the latest snapshot in Unix seconds, or 0 if the worker has no snapshot."""
        return self._model_snapshots.last_time

    def snapshot_soon(self) -> Future[float]:
        """See `ModelSnapshots.soon`."""
        return self._model_snapshots.soon()

    def running_seconds(self) -> float:
        """Return how long the longest engine call, save or import has run, or 0 if none is running."""
        return max(at.running_seconds() for at in (self.engine_call, self._saves, self.imports))

    def weigh(self, tenant: str, weight: float) -> None:
        """Set the weight of a tenant's share for its next turns."""
        self._shares.weigh(tenant, weight)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of later checkpoints and events. A lower epoch has no effect."""
        self._epoch = max(self._epoch, epoch)

    def prepare_stop(self) -> None:
        """Note that a later end of the process is not caused by the running call, unless the call hangs."""
        if self.engine_call.prepare_stop(self._attempt_policy.hang_seconds, self.running_seconds()):
            self._attempts.forget_all()

    def stop(self) -> None:
        """Wait for the current turn, take a snapshot of every model, and end the thread."""
        self._queues.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.imports.end_all()

    def _stamp(self) -> Stamp:
        return Stamp(self._epoch, self._clock())

    # ---- the engine's thread

    def _serve(self) -> None:
        with fatal_on_error("the engine's thread failed"):
            self._run_all()

    def _run_all(self) -> None:
        self.parking.at_start(self._queues.open())
        while (ready := self._queues.wait_for_turns(self.parking)) is not None:
            if callable(ready):
                ready()
            else:
                self._take_turn(ready)
        self.training_calls.drop_all()
        self._model_snapshots.at_stop()
        for queue in self._saves.wait_at_stop():  # at the end, because a storage may block until the process is killed
            self._runner.end_save(queue)

    def _take_turn(self, ready: Sequence[Ready]) -> None:
        by_model = {queue.model_id: (queue, turn, entry) for queue, turn, entry in ready}
        self.training_calls.keep_only(by_model)
        contenders = {contender.model_id: contender for contender in self.training_calls.contenders(ready)}
        chosen = self._shares.next(list(contenders.values()))
        if self.training_calls.has_others_than(chosen.model_id):
            reach("operation-preempted")
        started = self._engine.clock_seconds()
        queue, turn, entry = by_model[chosen.model_id]
        if any(wait(queue, entry) for wait in (self._saves.must_wait, self._retries.must_wait, self._loads.must_wait)):
            return
        is_there, resident_at = self.parking.make_resident(queue, entry), self._engine.clock_seconds()
        candidates = self._shares.cobatch_candidates(chosen, contenders.values())
        others = [by_model[candidate.model_id] for candidate in candidates]
        self._co_batcher.set_candidates([other for other in others if self.parking.holds(other[0])])
        if is_there:
            self._run(queue, turn, entry)
        # The time before and after a microbatch is free. On a busy machine it would include other programs.
        seconds = (resident_at if self._co_batcher.computed else self._engine.clock_seconds()) - started
        self._charge(chosen, seconds, contenders)
        for model_id in self._co_batcher.computed:
            if model_id != chosen.model_id:
                self._end_if_computed(*by_model[model_id])

    def _charge(self, chosen: Contender, seconds: float, contenders: Mapping[str, Contender]) -> None:
        """Charge each model for the model's own tokens.

        The chosen model is also charged for the time of work without tokens.
        """
        computed, read = self._co_batcher.computed, self._co_batcher.read
        self._shares.charge(chosen, computed.get(chosen.model_id, 0) + self._pace.worth(seconds))
        for model_id, tokens in computed.items():
            if model_id != chosen.model_id:
                self._shares.charge(contenders[model_id], tokens)
        for model_id, tokens in read.items():
            self._shares.charge(contenders[model_id], tokens)

    def _run(self, queue: ModelQueue, turn: Turn, entry: Entry) -> None:
        self._runner.run(queue, turn, entry)
        self.parking.used(queue)

    def _end_if_computed(self, queue: ModelQueue, turn: Turn, entry: Entry) -> None:
        """End a co-batched model's call if the call is computed, so that the client does not wait for another turn."""
        self.parking.used(queue)
        call = self.training_calls.find(queue.model_id)
        if call is not None and not call.on_engine.next_tokens:
            self._runner.run(queue, turn, entry)
