"""Co-batching: during the turn of one model, one forward computes microbatches of several models.

One forward of many short rows takes less time than one forward for each model. The engine decides which microbatches
can share a forward, and how many tokens fit. Each model pays only for the model's own tokens, in a shared forward and
in a turn of the model. With exact numerics co-batching changes no bits, and with fast numerics it changes the rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from tinsmith_rpc.zstd_frames import FrameInvalid, declared_bytes

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import Ready
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import EngineCall
from tinsmith_trainer.training.fair_shares import Pace
from tinsmith_trainer.training.training_calls import TrainingCall, TrainingCalls

BEGUN_EARLY_BYTES = 1024**2
"""The size up to which a body is read during a turn of another model. Reading a larger body takes as long as a turn."""
FREE_READING_SECONDS = 0.02
"""The time for reading an ordinary body, which is not charged.

If reading a body takes longer, the model pays for the additional seconds of processor time. The wall clock is not used,
because on a busy machine, the wall clock would also count other programs.
"""

MEASURED_FORWARDS = 5
TRIED_AGAIN_AFTER_FORWARDS = 64


@dataclass(slots=True)
class ForwardTimes:
    """The latest times of forwards of one size, in seconds per token, of single and of shared forwards."""

    alone: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    forwards: int = 0

    def sharing_pays(self) -> bool:
        """Return whether the next forward should be shared.

        Call this once for each forward that could be shared.

        Until both times are known, shared and separate forwards alternate. Later, the slower alternative is tried again
        from time to time.
        """
        self.forwards += 1
        if min(len(self.alone), len(self.shared)) < MEASURED_FORWARDS:
            return len(self.shared) <= len(self.alone)
        is_faster = median(self.shared) <= median(self.alone)
        return is_faster != (self.forwards % TRIED_AGAIN_AFTER_FORWARDS == 0)

    def note(self, seconds_per_token: float, *, shared: bool) -> None:
        known = self.shared if shared else self.alone
        known.append(seconds_per_token)
        del known[:-MEASURED_FORWARDS]


class CoBatcher:
    """The computation of microbatches. Used by the engine's thread only."""

    def __init__(
        self,
        engine: Engine,
        calls: TrainingCalls,
        take_payload: Callable[[Entry], bytes],
        attempts: Attempts,
        engine_call: EngineCall,
        pace: Pace,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._take_payload = take_payload
        self._attempts = attempts
        self._engine_call = engine_call
        self._pace = pace
        self._candidates: Sequence[Ready] = ()
        self._times: dict[tuple[int, bool], ForwardTimes] = {}
        self.computed: dict[str, int] = {}
        """For each model, the number of tokens computed in this turn."""
        self.read: dict[str, int] = {}
        """For each model, the cost in tokens of reading bodies in this turn."""

    def set_candidates(self, candidates: Sequence[Ready]) -> None:
        """Begin a turn in which the candidates may share the forward. Earlier candidates have precedence.

        The adapters of the candidates are in memory.
        """
        self._candidates, self.computed, self.read = candidates, {}, {}

    def begin(self, queue: ModelQueue, entry: Entry) -> TrainingCall:
        """Read the body of a training operation, and plan the microbatches. Raises TrainerError."""
        payload = self._take_payload(entry)
        entry.started_at = entry.started_at or time.time()
        started, cpu_started = self._engine.clock_seconds(), time.thread_time()
        try:
            with self._engine_call.at(entry.work):
                call = self._calls.begin(queue, entry, payload)
        finally:
            self.read[queue.model_id] = self._pace.worth(time.thread_time() - cpu_started - FREE_READING_SECONDS)
        call.seconds = self._engine.clock_seconds() - started
        return call

    def compute(self, first: TrainingCall) -> None:
        """Compute the next microbatch of `first`, and of the candidates that share the forward."""
        size, candidates = _size(first), self._sharing_candidates(first)
        if candidates and self._times.setdefault(size, ForwardTimes()).sharing_pays():
            self._compute([first, *self._co_batched(first, candidates)], size)
        else:
            self._compute([first], size)

    def _compute(self, group: Sequence[TrainingCall], size: tuple[int, bool]) -> None:
        tokens = [call.on_engine.next_tokens for call in group]
        started = self._engine.clock_seconds()
        with self._engine_call.at(*(call.entry.work for call in group)), self._dropping(group[1:]):
            self._engine.advance([call.on_engine for call in group])
            if len(group) > 1:
                reach("forward-shared")
        seconds_per_token = (self._engine.clock_seconds() - started) / sum(tokens)
        for call, own in zip(group, tokens, strict=True):
            call.seconds += own * seconds_per_token
            call.most_models = max(call.most_models, len(group))
            self.computed[call.model_id] = own
        self._pace.note(sum(tokens), sum(tokens) * seconds_per_token)
        self._times.setdefault(size, ForwardTimes()).note(seconds_per_token, shared=len(group) > 1)

    @contextmanager
    def _dropping(self, others: Sequence[TrainingCall]) -> Iterator[None]:
        """Drop the co-batched calls after an error that the engine cannot assign to one call.

        The dropped calls start again later.
        """
        try:
            yield
        except Exception:
            for other in others:
                self._calls.take(other.model_id)
            raise

    def _sharing_candidates(self, first: TrainingCall) -> list[Ready]:
        """Return the candidates with a training call, if the forward of `first` has room for at least one of them."""
        if not self._may_share(first.entry) or not self._engine.cobatch_room(first.on_engine):
            return []
        return [
            (queue, turn, entry)
            for queue, turn, entry in self._candidates
            if not turn.missing and self._may_share(entry)
        ]

    def _may_share(self, entry: Entry) -> bool:
        """Return whether the operation may share a forward.

        A replay runs alone, and so does an operation during which a process has ended. If the process ends again, this
        operation is known to be the cause.
        """
        operation = entry.operation
        is_call = operation.is_forward_backward and operation.rejection is None
        return is_call and not entry.is_finished and not self._attempts.is_suspect(entry.work)

    def _co_batched(self, first: TrainingCall, candidates: Sequence[Ready]) -> list[TrainingCall]:
        """Return the calls that the engine computes together with `first`: as many calls as fit."""
        found: list[TrainingCall] = []
        room = self._engine.cobatch_room(first.on_engine)
        for queue, _, entry in candidates:
            call = self._call_of(queue, entry) if room > 0 else None
            if call is None or not 0 < call.on_engine.next_tokens <= room:
                continue
            if len(self._engine.cobatch([first.on_engine, call.on_engine])) > 1:
                room -= call.on_engine.next_tokens
                found.append(call)
        return found

    def _call_of(self, queue: ModelQueue, entry: Entry) -> TrainingCall | None:
        call = self._calls.find(queue.model_id)
        if call is not None or not self._may_begin(entry):
            return call
        try:
            call = self.begin(queue, entry)
        except Exception:  # the error comes again in the model's own turn, which reports it
            return None
        self._calls.keep(call)
        return call

    def _may_begin(self, entry: Entry) -> bool:
        return entry.payload is not None and _unpacked_bytes(entry) <= BEGUN_EARLY_BYTES and self._calls.has_room()


def _unpacked_bytes(entry: Entry) -> int:
    assert entry.payload is not None
    if not entry.operation.zstd:
        return len(entry.payload)
    try:
        return declared_bytes(entry.payload) or 0
    except FrameInvalid:  # the body is refused in its model's own turn
        return len(entry.payload)


def _size(call: TrainingCall) -> tuple[int, bool]:
    """Return the size class of a forward: a power of two of tokens, and whether backward runs.

    Only times of the same class are compared.
    """
    return call.on_engine.next_tokens.bit_length(), call.request.forward_only
