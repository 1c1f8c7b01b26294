"""Loads of checkpoints. Threads read and check a checkpoint before the engine uses it.

If a checkpoint root is slow or does not answer, only models with a load are delayed. A model needs no slot while the
checkpoint is read.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.checkpoint_root import LoadedCheckpoint
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.process.exit import fatal_on_error
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import InFlightMarker, InFlightWork

log = structlog.get_logger(__name__)

LOADS = (worker_pb2.LOAD_MODEL, worker_pb2.LOAD_WEIGHTS)
MOST_LOADS = 2
"""The maximum number of concurrent loads. Each load has a thread, and keeps a checkpoint with moments in memory.

A tenant has at most one load.
"""
READ_SECONDS = 300.0
"""The maximum time of a read.

A thread that waits for a storage cannot be ended. After this time, the thread is abandoned.
"""
MOST_LEFT_BEHIND = 8
KEPT_SECONDS = 30.0
"""The time for which a loaded checkpoint waits for the model's turn while other loads wait.

After this time, the checkpoint is dropped, and later read again.
"""
SUSPECT_WAIT_SECONDS = 30.0
"""The maximum time for which a suspected operation waits for reads in progress, counted from the beginning of a read.

The time is counted from the beginning, so that the operation does not wait again before each microbatch.
"""

Read = Callable[[worker_pb2.LoadWeights], LoadedCheckpoint]


@dataclass(slots=True, eq=False)
class _Load:
    queue: ModelQueue
    work: InFlightWork
    request: worker_pb2.LoadWeights = field(default_factory=worker_pb2.LoadWeights)
    read: Future[LoadedCheckpoint] = field(default_factory=Future)
    began_at: float = field(default_factory=time.monotonic)
    waits_since: float = math.inf  # the start of the wait for its model's turn, on the monotonic clock
    ended: threading.Event = field(default_factory=threading.Event)

    def seconds(self) -> float:
        return time.monotonic() - self.began_at


class Loads:
    """The loads in progress. Used by the engine's thread. Reads run in other threads."""

    def __init__(self, read: Read, queues: ModelQueues, attempts: Attempts, marker: InFlightMarker) -> None:
        """Create the loads. `read` is thread-safe, and raises TrainerError."""
        self._read = read
        self._queues = queues
        self._attempts = attempts
        self._marker = marker
        self._loads: dict[str, _Load] = {}
        self._left_behind: list[_Load] = []
        self._waiting: dict[str, ModelQueue] = {}

    def must_wait(self, queue: ModelQueue, entry: Entry) -> bool:
        """Return whether the operation is a load, and the checkpoint must be read first.

        During the read, the model is held. If a process has ended during this load before, the checkpoint is read
        while the engine waits. If the process ends again, the load is known to be the cause.
        """
        operation = entry.operation
        is_read = operation.kind in LOADS and not entry.is_finished and operation.rejection is None
        if not is_read or self._attempts.is_suspect(entry.work) or self._is_stuck():
            return False
        load = self._loads.get(queue.model_id)
        if load is not None:
            return self._is_to_come(load)
        if self._has_slot_for(queue):
            self._begin(queue, entry)
        else:
            self._waiting[queue.model_id] = queue
            self._queues.hold(queue, KEPT_SECONDS)
        return True

    def outcome(self, queue: ModelQueue, entry: Entry) -> tuple[worker_pb2.LoadWeights, LoadedCheckpoint] | None:
        """Return the checkpoint for this model's load.

        A checkpoint is returned only once. Return None if the operation is not a load.

        Raises the error of the read.
        """
        if entry.operation.kind not in LOADS:
            return None
        load = self._loads.pop(queue.model_id, None)
        if load is None:
            return self._read_alone(queue, entry)
        self._mark()
        self._wake_waiting()
        if not load.read.done():
            self._left_behind.append(load)
            raise _unanswered(load)
        try:
            return load.request, load.read.result()
        finally:
            # An error refers to its frames, and the frames refer to the checkpoint.
            load.read = Future()

    def wait(self) -> None:
        """Wait until no read of a checkpoint is in progress.

        If the process ends after this wait, only the suspected operation can be the cause.

        The wait for a storage that does not answer is short, because a blocked read does not end a process.
        """
        for load in self._loads.values():
            load.ended.wait(max(SUSPECT_WAIT_SECONDS - load.seconds(), 0.0))
        self._mark()

    # ---- places

    def _is_to_come(self, load: _Load) -> bool:
        rest_seconds = READ_SECONDS - load.seconds()
        if load.read.done() or rest_seconds <= 0:
            return False
        self._queues.hold(load.queue, rest_seconds)
        return True

    def _has_slot_for(self, queue: ModelQueue) -> bool:
        for load in [load for load in self._loads.values() if self._is_unused(load)]:
            log.info("a checkpoint that was read is dropped", model_id=load.queue.model_id)
            del self._loads[load.queue.model_id]
        owners = {load.queue.owner for load in self._loads.values()}
        return len(self._loads) < MOST_LOADS and queue.owner not in owners

    def _is_unused(self, load: _Load) -> bool:
        """Return whether the load's model had no turn for a long time.

        A model without turns waits for a slot, or is quarantined.
        """
        return time.monotonic() - load.waits_since >= KEPT_SECONDS

    def _is_stuck(self) -> bool:
        self._left_behind = [load for load in self._left_behind if not load.ended.is_set()]
        return len(self._left_behind) >= MOST_LEFT_BEHIND

    def _wake_waiting(self) -> None:
        for waiting in self._waiting.values():
            self._queues.hold(waiting, 0.0)
        self._waiting.clear()

    # ---- reading

    def _begin(self, queue: ModelQueue, entry: Entry) -> None:
        self._waiting.pop(queue.model_id, None)
        load = self._loads[queue.model_id] = _Load(queue, entry.work)
        self._mark()
        self._queues.hold(queue, READ_SECONDS)
        try:
            self._start(load, entry)
        except Exception as error:  # the request is invalid, or the limit of threads is reached
            load.read.set_exception(error)
            self._end(load)

    def _start(self, load: _Load, entry: Entry) -> None:
        load.request = worker_pb2.LoadWeights.FromString(self._queues.take_payload(entry))
        threading.Thread(target=self._read_in_thread, args=(load,), name="loader", daemon=True).start()

    def _read_in_thread(self, load: _Load) -> None:
        # also for errors that are not Exceptions, such as a panic of a library
        with fatal_on_error("a checkpoint could not be read"):
            try:
                load.read.set_result(self._read(load.request))
            except Exception as error:
                load.read.set_exception(error)
            reach("load-read")
        load.ended.set()
        self._queues.between_turns(lambda: self._end(load))

    def _end(self, load: _Load) -> None:
        load.ended.set()
        load.waits_since = time.monotonic()
        if self._loads.get(load.queue.model_id) is load:
            self._mark()
            self._queues.hold(load.queue, 0.0)
        else:
            load.read = Future()  # the checkpoint came too late, and must not stay in memory

    def _read_alone(self, queue: ModelQueue, entry: Entry) -> tuple[worker_pb2.LoadWeights, LoadedCheckpoint]:
        """Read the checkpoint in this turn, while the engine waits."""
        if self._is_stuck():
            raise ServerError(
                f"The checkpoint root does not answer: {MOST_LEFT_BEHIND} reads have hung for more than "
                f"{READ_SECONDS:.0f} s. Nothing more is loaded until one of them ends, or the worker is restarted."
            )
        load = _Load(queue, entry.work)
        self._start(load, entry)
        if not load.ended.wait(READ_SECONDS):
            self._left_behind.append(load)
            raise _unanswered(load)
        return load.request, load.read.result()

    def _mark(self) -> None:
        self._marker.mark_background("loads", *(load.work for load in self._loads.values() if not load.read.done()))


def _unanswered(load: _Load) -> ServerError:
    return ServerError(
        f"{load.request.tinker_path} could not be loaded: its checkpoint was not read within {READ_SECONDS:.0f} s. "
        "Send the request again when the storage answers."
    )


def check_rank(path: str, rank: int, limit: int) -> None:
    """Raise UserError for an adapter with a rank above this worker's limit."""
    if rank > limit:
        raise UserError(f"{path} holds a LoRA adapter of rank {rank}; this worker's limit is {limit}, its max_rank.")


def check_same_shape(path: str, own: LoraSpec, other: LoraSpec) -> None:
    """Raise UserError for an adapter that cannot replace the adapter of this model."""

    def shape(lora: LoraSpec) -> tuple[object, ...]:
        return lora.rank, lora.alpha, lora.train_attn, lora.train_mlp, lora.train_unembed

    if shape(own) != shape(other):
        raise UserError(
            f"{path} holds a LoRA adapter of another shape ({_describe(other)}) than this model ({_describe(own)}). "
            "Create a training client from the checkpoint instead."
        )


def _describe(lora: LoraSpec) -> str:
    families = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    return f"rank {lora.rank}, alpha {lora.alpha:g}, {' + '.join(families)}"
