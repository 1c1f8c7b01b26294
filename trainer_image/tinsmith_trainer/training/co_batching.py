"""Whose microbatches are computed in one forward, when one of them has its turn.

A forward of many short rows takes less time than one for each: the engine says which fit together, and how much room
there is. Who goes along is charged for it as if it were its own turn. Bits do not depend on any of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from tinsmith_rpc.zstd_frames import FrameInvalid, declared_bytes

from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import Ready
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.process.in_flight_marker import EngineCall
from tinsmith_trainer.training.executor import Executor
from tinsmith_trainer.training.fair_shares import Contender, Pace
from tinsmith_trainer.training.training_calls import CallInProgress, CallsInProgress
from tinsmith_trainer.wire.codec import OpenedBody

BEGUN_EARLY_BYTES = 1024**2
"""A larger body is read when its own turn comes: to read it is a turn by itself."""
FREE_READING_SECONDS = 0.02
"""Reading an ordinary body takes less. More is charged to its sender, in seconds of the processor: those of the clock
would be another program's on a busy machine."""

MEASURED_FORWARDS = 5
TRIED_AGAIN_AFTER_FORWARDS = 64


@dataclass(slots=True)
class Measured:
    """What a microbatch of one size takes, by itself and in company: the middle of the latest, in seconds a token."""

    alone: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    forwards: int = 0

    def pays(self) -> bool:
        """Whether the next forward is to be shared, asked once for each that could be.

        Until both are known they are tried in turn, and once in a while the one that is slower is tried again.
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


class Company:
    """Used by the engine's thread alone."""

    def __init__(
        self,
        executor: Executor,
        calls: CallsInProgress,
        take_payload: Callable[[Entry], bytes],
        attempts: Attempts,
        engine_call: EngineCall,
        pace: Pace,
    ) -> None:
        self._executor = executor
        self._calls = calls
        self._take_payload = take_payload
        self._attempts = attempts
        self._engine_call = engine_call
        self._pace = pace
        self._invited: Sequence[Ready] = ()
        self._measured: dict[tuple[int, bool], Measured] = {}
        self.computed: dict[str, int] = {}
        """In tokens, in this turn, by model."""
        self.read: dict[str, int] = {}
        """The cost of reading bodies in this turn, in tokens, by model."""

    def invite(self, others: Sequence[Ready]) -> None:
        """A turn begins. These may go along, the first ones first; their adapters are in memory."""
        self._invited, self.computed, self.read = others, {}, {}

    def begin(self, queue: ModelQueue, entry: Entry) -> CallInProgress:
        """Reads what was submitted, and plans it. Raises TrainerError."""
        payload = self._take_payload(entry)
        entry.started_at = entry.started_at or time.time()
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            with self._engine_call.at(entry.work):
                training = self._executor.start(entry.operation, self._open(entry, payload))
        finally:
            self.read[queue.model_id] = self._pace.worth(time.thread_time() - cpu_started - FREE_READING_SECONDS)
        seconds = time.perf_counter() - started
        return CallInProgress(Contender(queue.tenant, queue.model_id), entry, training, seconds)

    def _open(self, entry: Entry, payload: bytes) -> OpenedBody:
        body = self._executor.open(entry.operation, payload)
        entry.forward_only = body.forward_only
        return body

    def compute(self, first: CallInProgress) -> None:
        """Its next microbatch, and those of whoever goes along."""
        size, invited = _size(first), self._invited_beside(first)
        if invited and self._measured.setdefault(size, Measured()).pays():
            self._compute([first, *self._who_goes_along(first, invited)], size)
        else:
            self._compute([first], size)

    def _compute(self, group: Sequence[CallInProgress], size: tuple[int, bool]) -> None:
        tokens = [call.training.next_tokens for call in group]
        started = time.perf_counter()
        with self._engine_call.at(*(call.entry.work for call in group)), self._dropping(group[1:]):
            self._executor.compute([call.training for call in group])
            if len(group) > 1:
                reach("forward-shared")
        seconds_per_token = (time.perf_counter() - started) / sum(tokens)
        for call, own in zip(group, tokens, strict=True):
            call.seconds += own * seconds_per_token
            self.computed[call.contender.model_id] = own
        self._pace.note(sum(tokens), sum(tokens) * seconds_per_token)
        if size in self._measured:
            self._measured[size].note(seconds_per_token, shared=len(group) > 1)

    @contextmanager
    def _dropping(self, others: Sequence[CallInProgress]) -> Iterator[None]:
        """After an error that the engine did not keep to a call: the others begin again, from what was submitted."""
        try:
            yield
        except Exception:
            for other in others:
                self._calls.take(other.contender.model_id)
            raise

    def _invited_beside(self, first: CallInProgress) -> list[Ready]:
        """Those with a call of their own, where its forward has room for any."""
        if not self._may_share(first.entry) or not self._executor.cobatch_room(first.training):
            return []
        return [
            (queue, turn, entry) for queue, turn, entry in self._invited if not turn.missing and self._may_share(entry)
        ]

    def _may_share(self, entry: Entry) -> bool:
        """What ran before a crash, or at the end of a process, runs by itself: so only who is to blame is blamed."""
        operation = entry.operation
        is_call = operation.is_forward_backward and operation.rejection is None
        return is_call and not entry.is_finished and not self._attempts.is_suspect(entry.work)

    def _who_goes_along(self, first: CallInProgress, invited: Sequence[Ready]) -> list[CallInProgress]:
        """Of those that the engine takes together, as many as there is room for."""
        found: list[CallInProgress] = []
        room = self._executor.cobatch_room(first.training)
        for queue, _, entry in invited:
            call = self._call_of(queue, entry) if room > 0 else None
            if call is None or not 0 < call.training.next_tokens <= room:
                continue
            if call.training in self._executor.together(first.training, [call.training]):
                room -= call.training.next_tokens
                found.append(call)
        return found

    def _call_of(self, queue: ModelQueue, entry: Entry) -> CallInProgress | None:
        call = self._calls.find(queue.model_id)
        if call is not None or not self._may_begin(entry):
            return call
        try:
            call = self.begin(queue, entry)
        except Exception:  # it fails when its own turn comes
            return None
        self._calls.give_back(call)
        return call

    def _may_begin(self, entry: Entry) -> bool:
        return entry.payload is not None and _unpacked_bytes(entry) <= BEGUN_EARLY_BYTES and self._calls.has_room()


def _unpacked_bytes(entry: Entry) -> int:
    assert entry.payload is not None
    if not entry.operation.zstd:
        return len(entry.payload)
    try:
        return declared_bytes(entry.payload) or 0
    except FrameInvalid:  # it fails when its own turn comes
        return len(entry.payload)


def _size(call: CallInProgress) -> tuple[int, bool]:
    """What is compared: tokens, from one power of two to the next, and whether there is a backward."""
    return call.training.next_tokens.bit_length(), call.training.request.forward_only
