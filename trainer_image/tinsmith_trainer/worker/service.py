"""The service of a worker: one object that owns the journal, the scheduler and the samples.

The RPCs call methods of this object.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.offered_saves import OfferedSaves
from tinsmith_trainer.checkpoints.shared_saves import SharedSaves
from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import Category, Draining, Failure, JournalFull, ServerError
from tinsmith_trainer.oplog import journal_tables, result_tables
from tinsmith_trainer.oplog.attempts import AttemptPolicy
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import Operation, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.oplog.tidying import TIDY_SECONDS, Tidying
from tinsmith_trainer.process.exit import fatal_callback, register_marker
from tinsmith_trainer.process.in_flight_marker import InFlightMarker
from tinsmith_trainer.process.usage_meter import UsageMeter
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.sample_queue import Samples
from tinsmith_trainer.sampling.sampler_adapters import AdapterLimits, SamplerAdapters
from tinsmith_trainer.sampling.weight_sources import WeightSources
from tinsmith_trainer.training.executor import Executor
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.training.scheduler import Scheduler
from tinsmith_trainer.training.snapshotting import SnapshotPolicy
from tinsmith_trainer.wire.unknown_fields import unknown_fields_of, unknown_fields_of_operation
from tinsmith_trainer.worker.accounting import Accounting, record_in_trace
from tinsmith_trainer.worker.admission import Admission
from tinsmith_trainer.worker.client_activity import ClientActivity
from tinsmith_trainer.worker.volume import Volume, check_base_model

log = structlog.get_logger(__name__)

T = TypeVar("T")

SERVER_SILENCE_SECONDS = 30.0
TICK_SECONDS = 1.0
LONG_SECONDS = 120.0
"""The duration of work from which on its duration is reported to waiting clients."""
DRAINING_POLL_SECONDS = 0.2
SHUTTING_DOWN = "this worker is shutting down"
PLACES_PER_SLOT = 8
"""The number of models that a worker accepts for each adapter slot.

Most models are idle: the client is grading samples, or the session has not timed out yet.
"""
SAMPLED_ADAPTERS = 64
SAMPLED_ADAPTER_BYTES = 4 * 1024**3
"""The limits on adapter versions for sampling, in addition to the adapters in training.

The limit in bytes applies only to unused versions.
"""


class NotActive(Exception):
    """An error for a call without the current epoch.

    The caller does not own this worker: another server owns it, or no server.
    """


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker.

    `sampler` is None if the worker does not sample. `shared_saves` is for a sampler on the same machine,
    `offered_saves` for samplers in other pods. `model_places` is the maximum number of models, in memory or parked. If
    `model_places` is None, the maximum is a fixed number for each adapter slot.
    """

    engine: Engine
    sampler: Sampler | None
    checkpoints: CheckpointRoot
    volume: Volume
    policy: SnapshotPolicy
    attempts: AttemptPolicy = AttemptPolicy()
    model_places: int | None = None
    reports_co_batching: bool = False
    residency: ResidencyRules = ResidencyRules()
    journal_vfs: str | None = None
    shared_saves: SharedSaves | None = None
    offered_saves: OfferedSaves = field(default_factory=lambda: OfferedSaves(size_bytes=0))


class WorkerService:
    """The implementation of all RPCs. Used on one event loop. Raises the errors named in `worker.proto`."""

    def __init__(self, parts: WorkerParts) -> None:
        self.instance_id = uuid.uuid4().hex
        self.epoch = 0
        self.activity = ClientActivity()
        # the reading of the journal, which all activating calls share
        self._recovery: asyncio.Task[None] | None = None
        self.parts = parts
        self._loop = asyncio.get_running_loop()
        self._room = parts.volume.room
        self.journal = Journal(parts.volume.journal_path, vfs=parts.journal_vfs, room=self._room)
        self._marker = InFlightMarker(parts.volume.in_flight_marker_path)
        register_marker(self._marker)
        models = self.journal.read(journal_tables.read_models).result()
        snapshots = SnapshotFolder(parts.volume.snapshots_path, self._room)
        # This comes first, because files of an earlier process may fill the disk.
        snapshots.keep_only(model.snapshot_file for model in models if model.snapshot_file)
        live = sum(model.is_open for model in models)
        check_base_model(self.journal, parts.engine.base_model(), parts.volume.directory, live)
        self._adapters_in_journal = sum(model.is_open and model.applied >= 0 for model in models)
        self.executor = Executor(parts.engine, parts.checkpoints, parts.shared_saves)
        self.model_places = parts.model_places or PLACES_PER_SLOT * parts.engine.capabilities().adapter_slots
        self.queues = ModelQueues(self.journal, self.model_places, self._announce)
        self._admission = Admission(self._room, self.queues, parts.volume.directory)
        self.accounting = Accounting(self.journal)
        self.samples = self._samples_of(parts, self.accounting.meter)
        self.scheduler = Scheduler(
            parts.engine,
            self.executor,
            self.queues,
            self.journal,
            snapshots,
            on_result=self._on_result,
            marker=self._marker,
            policy=parts.policy,
            attempts=parts.attempts,
            residency=parts.residency,
            reports_co_batching=parts.reports_co_batching,
        )
        self._waiters: dict[tuple[str, int], asyncio.Event] = {}
        self._journal_is_closed = False
        self._new_events = asyncio.Event()
        self._acknowledged_event_id = 0
        self._last_contact_at = time.monotonic()
        self._draining = False
        self._importing = asyncio.Lock()
        self._cache = ResultCache()
        self._tidying = Tidying(self.journal, self.queues, snapshots, self._room)

    # ---- life

    async def activate(self, epoch: int, event_cursor: int = 0) -> None:
        """Activate the worker for this epoch.

        Raises NotActive if the worker has seen a higher epoch, and also Draining and JournalFull.
        """
        self._check_stays()
        raised = self.journal.write(lambda db: journal_tables.raise_epoch(db, epoch, event_cursor), uses_reserve=True)
        seen = await asyncio.wrap_future(raised)
        self._check_stays()  # a start now would read a journal that is about to close
        if epoch < seen:
            raise NotActive(f"epoch {epoch} is over: this worker has seen epoch {seen}")
        self.scheduler.set_epoch(epoch)
        await self._recovered()
        self.epoch = max(self.epoch, epoch)

    async def _recovered(self) -> None:
        """Read the journal once. After JournalFull the next call tries again."""
        if self._recovery is None:
            self._recovery = self._loop.create_task(asyncio.to_thread(self.scheduler.start))
        recovery = self._recovery
        try:
            await asyncio.shield(recovery)
        except JournalFull:
            if self._recovery is recovery:
                self._recovery = None
            raise

    async def run_clock(self) -> None:
        """Age the gaps while both server and worker run, maintain the reserve, and delete expired data."""
        since_tidy = 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if time.monotonic() - self._last_contact_at < SERVER_SILENCE_SECONDS:
                self.queues.age_gaps(TICK_SECONDS)
            await asyncio.to_thread(self._room.keep_reserve)
            since_tidy += TICK_SECONDS
            if since_tidy >= TIDY_SECONDS:
                since_tidy = 0.0
                await self.tidy()

    def _check_stays(self) -> None:
        if self._draining:
            raise Draining(SHUTTING_DOWN)

    async def drain(self) -> None:
        """Refuse new work, finish the current turn, take snapshots, and close the journal."""
        if self._draining:
            return
        self._draining = True
        self._new_events.set()
        self.scheduler.prepare_stop()
        if self.samples is not None:
            self.samples.stop_taking()
        self.queues.stop()
        if self._recovery is not None:  # its thread cannot be interrupted, and would start the engine after the drain
            await asyncio.wait({self._recovery})
        await asyncio.to_thread(self.scheduler.stop)
        if self.parts.sampler is not None:
            await asyncio.to_thread(self.parts.sampler.close)
        await asyncio.to_thread(self.parts.engine.close)
        await asyncio.to_thread(self.accounting.keep)
        self._journal_is_closed = True
        await asyncio.to_thread(self.journal.close)
        self._marker.close()

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def adapters_used(self) -> int:
        """The number of adapters. The number of adapters is also known before the activation.

        If the worker has no adapters, the worker's volume may be deleted.
        """
        if self._recovery is None or not self._recovery.done():
            return self._adapters_in_journal
        return sum(queue.holds_a_place for queue in self.queues.open())

    @property
    def works(self) -> bool:
        """True if work runs or waits. Operations that wait for another image do not count."""
        if self._recovery is None or not self._recovery.done() or self.scheduler.running_seconds() > 0:
            return True
        waits = any(queue.order.waiting_count and not queue.quarantined for queue in self.queues.open())
        return waits or (self.samples is not None and self.samples.unfinished > 0)

    def note_contact(self) -> None:
        self._last_contact_at = time.monotonic()

    # ---- operations

    async def submit(
        self, request: worker_pb2.SubmitRequest, tenant: str = "", share_weight: float = 1.0, traceparent: str = ""
    ) -> int:
        """Accept an operation.

        Return the operation's number when the operation is on disk. `tenant` and the weight of its share affect only
        fair shares, and `traceparent` only traces.

        Raises NotActive, Draining, UnknownModel, JournalFull.
        """
        self._check_epoch(request.epoch)
        self.scheduler.weigh(tenant, share_weight)
        claimed_bytes = 0
        if not self.queues.is_known(request):
            claimed_bytes = await self._admission.claim(request, tenant or request.model_id)
        try:
            number, on_disk = self.queues.accept(*_operation(request, time.time(), traceparent), tenant)
        except BaseException:
            self._admission.release(claimed_bytes)
            raise
        release = fatal_callback("a claim could not be released", lambda _: self._admission.release(claimed_bytes))
        on_disk.add_done_callback(release)
        await asyncio.shield(asyncio.wrap_future(on_disk))
        return number

    async def wait_for(self, model_id: str, seq_id: int, timeout_seconds: float) -> OperationResult | None:
        """Return the result, or None if the operation has no result before the timeout.

        Raises KeyError for an unknown operation.
        """
        if self.epoch == 0:
            raise NotActive("this worker has not been activated, and does not know what its journal holds")
        position = self.queues.position_of(model_id, seq_id)
        finished = self.queues.is_finished(model_id, position)
        if finished is None:
            raise KeyError((model_id, seq_id))
        if not finished:
            await self._wait_until_announced(model_id, position, timeout_seconds)
        if not self.queues.is_finished(model_id, position):
            return None
        return await self._result(model_id, position)

    def pending(self, model_id: str, seq_id: int) -> worker_pb2.Pending:
        """Return why an operation has not run, if the reason is not only that other operations run first."""
        if self.queues.waits_for_a_place(model_id):
            full = f"all {self.model_places} places of this worker are taken; waiting until a session ends"
            return worker_pb2.Pending(reason=full, paused_capacity=True)
        queue = self.queues.find(model_id)
        if queue is not None and (reason := self.scheduler.parking.problem_of(queue)):
            return worker_pb2.Pending(reason=reason, paused_capacity=True)
        gap_at = queue.order.open_gap() if queue is not None else None
        if queue is None or gap_at is None or gap_at > queue.plain.positions.position_of(seq_id):
            return self._running_long()
        # The journal's thread may have filled the gap since then.
        missing = next(iter(queue.order.missing()), None)
        return worker_pb2.Pending(
            reason="" if missing is None else f"waiting for operation {missing}, which has not arrived yet"
        )

    def _running_long(self) -> worker_pb2.Pending:
        """Return how long the worker's current work has run, if this is unusually long."""
        seconds = self.scheduler.running_seconds()
        if seconds < LONG_SECONDS:
            return worker_pb2.Pending()
        reason = f"this worker has computed one microbatch, step or save for {seconds:.0f} s"
        return worker_pb2.Pending(reason=reason, paused_capacity=True)

    async def events(self, after: int, timeout_seconds: float) -> list[bytes]:
        """Return the events after the cursor, as soon as an event exists or the timeout ends."""
        self._acknowledged_event_id = max(self._acknowledged_event_id, after)
        deadline = self._loop.time() + timeout_seconds
        while True:
            self._new_events.clear()
            # A read of a closed journal would never end. Later events are read from the next process.
            reads = not self._journal_is_closed
            found = await self._read(lambda db: result_tables.read_events(db, after)) if reads else []
            remaining = deadline - self._loop.time()
            if found or remaining <= 0:
                return found
            if self._draining:
                # The server asks again until the worker has stopped.
                await asyncio.sleep(min(remaining, DRAINING_POLL_SECONDS))
                return found
            try:
                async with asyncio.timeout(remaining):
                    await self._new_events.wait()
            except TimeoutError:
                return []

    async def snapshot(self) -> float:
        """Save all changes since the last snapshot.

        The save begins after the current turn. Return the time of the snapshots in Unix seconds.

        Raises NotActive, Draining, JournalFull, SnapshotRefused.
        """
        if self._draining:
            raise Draining(SHUTTING_DOWN)
        if self.epoch == 0:
            raise NotActive("this worker has not been activated, and has loaded nothing that could have changed")
        return await asyncio.wrap_future(self.scheduler.snapshot_soon())

    async def import_adapter(self, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        """Import an adapter. Only one import runs at a time, because the files of an import are in memory.

        Raises TrainerError, NotActive, Draining.
        """
        if unknown := unknown_fields_of(request):
            raise ServerError(unknown)
        await self._importing.acquire()
        try:
            self._check_stays()
            if self.epoch == 0:
                raise NotActive("this worker has not been activated, and begins nothing")
            reading = asyncio.wrap_future(self.scheduler.imports.submit(request))
        except Exception:
            self._importing.release()
            raise
        # The thread continues if its caller gives up, so the next import waits for the thread.
        reading.add_done_callback(self._imported)
        return await asyncio.shield(reading)

    def _imported(self, reading: asyncio.Future[worker_pb2.ImportAdapterReply]) -> None:
        self._importing.release()
        if not reading.cancelled():
            # if the caller gave up, asyncio would report an exception that was not retrieved
            reading.exception()

    def _check_epoch(self, epoch: int) -> None:
        if self._draining:
            raise Draining(SHUTTING_DOWN)
        if self.epoch == 0 or epoch != self.epoch:
            raise NotActive(f"epoch {epoch} does not own this worker, whose epoch is {self.epoch}")

    async def _wait_until_announced(self, model_id: str, seq_id: int, timeout_seconds: float) -> None:
        waiter = self._waiters.setdefault((model_id, seq_id), asyncio.Event())
        if self.queues.is_finished(model_id, seq_id) is not False:
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                await waiter.wait()
        except TimeoutError:
            return

    async def _result(self, model_id: str, seq_id: int) -> OperationResult:
        if (cached := self._cache.get((model_id, seq_id))) is not None:
            return cached
        result = await self._read(lambda db: journal_tables.read_result(db, model_id, seq_id))
        if result is None:
            raise AssertionError(f"operation {seq_id} of {model_id} was announced before its result was on disk")
        self._cache.put((model_id, seq_id), result)
        return result

    def _announce(self, model_id: str, seq_id: int) -> None:
        """Wake the calls that wait for this result. Called from the journal's thread."""
        self._loop.call_soon_threadsafe(self._wake, (model_id, seq_id))

    def _wake(self, key: tuple[str, int]) -> None:
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            waiter.set()
        self._new_events.set()

    def _on_result(self, queue: ModelQueue, entry: Entry, result: OperationResult) -> None:
        self.accounting.note_result(queue, result)
        if entry.operation.traceparent:
            record_in_trace(entry, result)
        if result.saved is None:
            return
        if self.samples is not None:
            self.samples.adapters.remember_saved(result.saved)
        self.parts.offered_saves.add(result.saved)

    async def _read(self, run: Callable[[journal_tables.Database], T]) -> T:
        return await asyncio.wrap_future(self.journal.read(run))

    async def tidy(self) -> None:
        """Delete expired results, operations, events and released models. Before the journal is read, do nothing."""
        if self._recovery is None or not self._recovery.done():
            return
        await self._tidying.round(self._acknowledged_event_id)

    @staticmethod
    def _samples_of(parts: WorkerParts, usage: UsageMeter) -> Samples | None:
        if parts.sampler is None:
            return None
        limits = AdapterLimits(SAMPLED_ADAPTERS, parts.engine.capabilities().max_rank, SAMPLED_ADAPTER_BYTES)
        sources = WeightSources(parts.checkpoints, parts.engine.base_model())
        adapters = SamplerAdapters(parts.sampler, sources, limits)
        return Samples(parts.sampler, adapters, usage=usage)


def _operation(request: worker_pb2.SubmitRequest, now: float, traceparent: str) -> tuple[Operation, bytes]:
    rejection = None
    if request.HasField("rejection"):
        category: Category = "user" if request.rejection.category == worker_pb2.USER else "server"
        rejection = Failure(category, request.rejection.message)
    elif reason := unknown_fields_of_operation(request.kind, request.payload):
        rejection = Failure("server", reason)
    at = (request.model_id, request.seq_id, request.kind, request.zstd, now)
    operation = Operation(*at, rejection, idempotency_key=request.idempotency_key, traceparent=traceparent)
    return operation, _with_seed(request)


def _with_seed(request: worker_pb2.SubmitRequest) -> bytes:
    """Add a missing seed to the request before the journal stores it, so that a replay draws the same weights."""
    if request.kind != worker_pb2.CREATE_MODEL:
        return request.payload
    create = worker_pb2.CreateModel.FromString(request.payload)
    if not create.lora.HasField("seed"):
        create.lora.seed = random.SystemRandom().randrange(2**31)
    return create.SerializeToString()


CACHED_RESULT_BYTES = 64 * 1024**2
RESULT_ENTRY_BYTES = 512
"""The memory of a cached result for the key and the objects, without the payload and the message."""


class ResultCache:
    """The latest results. With the cache, a poll right after the end of an operation does not read the journal.

    The newest result is kept, even if it is very large. If a large result were not kept, a client that asks for the
    result repeatedly would occupy the journal's thread, for which all submissions wait.
    """

    def __init__(self, capacity_bytes: int = CACHED_RESULT_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._results: OrderedDict[tuple[str, int], OperationResult] = OrderedDict()

    def get(self, key: tuple[str, int]) -> OperationResult | None:
        return self._results.get(key)

    def put(self, key: tuple[str, int], result: OperationResult) -> None:
        replaced = self._results.pop(key, None)
        if replaced is not None:
            self._bytes -= _cached_bytes(replaced)
        self._results[key] = result
        self._bytes += _cached_bytes(result)
        while self._bytes > self._capacity_bytes and len(self._results) > 1:
            _, oldest = self._results.popitem(last=False)
            self._bytes -= _cached_bytes(oldest)


def _cached_bytes(result: OperationResult) -> int:
    """Return the size of a result.

    The size is never 0, because a failure has no payload and a client may cause many failures.
    """
    message = result.failure.message if result.failure else ""
    return RESULT_ENTRY_BYTES + len(result.payload or b"") + len(message)
