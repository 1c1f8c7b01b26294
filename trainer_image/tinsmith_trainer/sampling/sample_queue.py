"""Samples in flight and their results, in memory: a crash forgets them, and clients submit again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import Draining, SamplerClosed, StorageUnavailable, TrainerError, UserError
from tinsmith_trainer.oplog.journal_tables import Failure
from tinsmith_trainer.sampling.base import SampleOutcome, Sampler
from tinsmith_trainer.sampling.codec import decode_sample, encode_sample, unpacked_bytes
from tinsmith_trainer.sampling.sampler_adapters import AdapterInUse, SamplerAdapters
from tinsmith_trainer.sampling.tenant_limits import KeptResults, SharedRoom

log = structlog.get_logger(__name__)

STORAGE_PAUSE_SECONDS = 2.0
"""How long a sample is kept whose adapter cannot be read now: its client submits it again at once."""

UNFETCHED_SECONDS = 60.0
"""How long results wait for somebody to fetch them. A client that lives asks again every 25 s."""


class TooManySamples(Exception):
    """The client should hold back for a second and send the same request again."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Of all tenants together; one alone has half of what may wait.

    `waiting_bytes` are of prompts, target tokens, of which a sparse tensor of a few bytes may make many, and answers.
    """

    waiting_samples: int = 16384
    waiting_bytes: int = 1024**3
    result_bytes: int = 512 * 1024**2
    result_seconds: float = 3600.0


@dataclass(slots=True)
class _Sample:
    """Finished without a result: it was lost with the sampler."""

    tenant: str
    nbytes: int
    result: bytes | Failure | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    adapter: AdapterInUse | None = None
    cancelled: bool = False


class Samples:
    """Takes sample requests, gets the adapters they name, keeps the results for an hour. One event loop's."""

    def __init__(self, sampler: Sampler, adapters: SamplerAdapters, limits: QueueLimits | None = None) -> None:
        limits = limits or QueueLimits()
        self.adapters = adapters
        self.sampler = sampler
        self._samples: dict[str, _Sample] = {}
        self._kept = KeptResults(limits.result_bytes, limits.result_seconds)
        self._places = SharedRoom(limits.waiting_samples)
        self._room = SharedRoom(limits.waiting_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._drain_tracker = DrainTracker()
        self._draining = False

    def submit(self, request: worker_pb2.SampleRequest, tenant: str) -> None:
        """The same request_id again is the same sample. Raises Draining, and TooManySamples of the tenant's own."""
        if request.request_id in self._samples:
            return
        if self._draining:
            raise Draining("this sampler is shutting down, and takes no more samples")
        nbytes = unpacked_bytes(request)
        if not (self._places.fits(tenant, 1) and self._room.fits(tenant, nbytes)):
            raise TooManySamples(
                "this sampler has as many of your samples as it takes; send it again when some are done"
            )
        self._forget_old()
        self._samples[request.request_id] = _Sample(tenant, nbytes)
        self._places.take(tenant, 1)
        self._room.take(tenant, nbytes)
        self._drain_tracker.took(request.request_id)
        if request.HasField("rejection"):
            self._finish(request.request_id, Failure("user", request.rejection.message))
            return
        task = self._loop.create_task(self._start(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def prepare(self, adapter: worker_pb2.AdapterRef) -> None:
        """Samples of it are about to come."""
        if not self._draining:
            self.adapters.prepare(adapter)

    async def wait(self, request_id: str, timeout_seconds: float) -> bytes | Failure | None:
        """The result, or None when it is not there in time. Raises KeyError for ids that are not known, or lost."""
        sample = self._samples[request_id]
        if not sample.finished.is_set():  # also with a timeout of 0, which wait_for would not grant a single look
            try:
                async with asyncio.timeout(timeout_seconds):
                    await sample.finished.wait()
            except TimeoutError:
                return None
        if sample.result is None:
            raise KeyError(request_id)
        self._drain_tracker.settled(request_id)
        return sample.result

    def cancel(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        sample = self._samples.get(request_id)
        if sample is not None:
            sample.cancelled = True
            self._drain_tracker.settled(request_id)
            self.sampler.cancel(request_id)

    def stop_taking(self) -> None:
        """New samples are refused from now on; those that were taken go on, and can be fetched."""
        self._draining = True

    async def drained(self) -> None:
        """Returns when all that was taken is done and was fetched, or not for so long that nobody will."""
        await self._drain_tracker.complete()

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def unfinished(self) -> int:
        return len(self._samples) - len(self._kept)

    async def _start(self, request: worker_pb2.SampleRequest) -> None:
        """Whatever goes wrong here is the sample's failure, unless it may pass: nobody else would ever finish it."""
        request_id = request.request_id
        sample = self._samples[request_id]

        def done(outcome: SampleOutcome) -> None:
            self._loop.call_soon_threadsafe(self._end, request, outcome)

        try:
            if request.adapter.directory:
                sample.adapter = await self.adapters.take(request.adapter, sample.tenant)
            await self.adapters.read_assets(request, sample.tenant)
            if sample.cancelled:
                raise UserError("The request was cancelled.")
            self.sampler.submit(decode_sample(request, sample.tenant), done)
        except StorageUnavailable:
            await asyncio.sleep(STORAGE_PAUSE_SECONDS)
            self._lose(request_id)
        except TrainerError as error:
            self._end(request, SampleOutcome(error=error))
        except Exception as error:
            log.exception("a sample could not be started", request_id=request_id)
            self._finish(request_id, Failure("server", f"{type(error).__name__}: {error}"))

    def _end(self, request: worker_pb2.SampleRequest, outcome: SampleOutcome) -> None:
        if isinstance(outcome.error, SamplerClosed):
            self._lose(request.request_id)
        else:
            self._finish(request.request_id, _as_result(outcome, request))

    def _finish(self, request_id: str, result: bytes | Failure) -> None:
        sample = self._samples[request_id]
        sample.result = result
        self._kept.add(request_id, sample.tenant, _size(result), time.monotonic())
        self._drain_tracker.finished(request_id)
        if sample.cancelled:
            self._drain_tracker.settled(request_id)
        self._let_go(sample)
        self._forget_old()

    def _lose(self, request_id: str) -> None:
        """As if it had never been here: whoever asks submits it again, elsewhere."""
        self._drain_tracker.lost(request_id)
        self._let_go(self._samples.pop(request_id))

    def _let_go(self, sample: _Sample) -> None:
        self._places.give_back(sample.tenant, 1)
        self._room.give_back(sample.tenant, sample.nbytes)
        sample.finished.set()
        if sample.adapter is not None:
            self.adapters.give_back(sample.adapter, sample.tenant)
            sample.adapter = None

    def _forget_old(self) -> None:
        """Whoever waits for one of them has it."""
        for forgotten in self._kept.forget(time.monotonic()):
            self._drain_tracker.settled(forgotten)
            del self._samples[forgotten]


class DrainTracker:
    """The samples that somebody may still come for: when none is left, a sampler that takes no more may go.

    One event loop's, whose clock it reads unless given another.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._unfinished: set[str] = set()
        self._unfetched: set[str] = set()
        self._last_finish = -math.inf
        self._changed = asyncio.Event()

    def took(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def finished(self, request_id: str) -> None:
        """From now on there is a result to fetch."""
        self._unfinished.discard(request_id)
        self._unfetched.add(request_id)
        self._last_finish = self._clock()
        self._changed.set()

    def settled(self, request_id: str) -> None:
        """Its result was fetched, or nobody will ever want it."""
        self._unfetched.discard(request_id)
        self._changed.set()

    def lost(self, request_id: str) -> None:
        """There will be no result."""
        self._unfinished.discard(request_id)
        self.settled(request_id)

    def remaining_seconds(self) -> float:
        """How much longer this process is needed: 0: no more; infinite while a sample runs."""
        if self._unfinished:
            return math.inf
        if not self._unfetched:
            return 0.0
        return max(0.0, self._last_finish + UNFETCHED_SECONDS - self._clock())

    async def complete(self) -> None:
        """Returns when the process may go. Samples that are taken meanwhile are waited for, too."""
        while (remaining := self.remaining_seconds()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if math.isinf(remaining) else remaining):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _size(result: bytes | Failure) -> int:
    return len(result.message) if isinstance(result, Failure) else len(result)


def _as_result(outcome: SampleOutcome, request: worker_pb2.SampleRequest) -> bytes | Failure:
    if outcome.error is not None:
        return Failure(outcome.error.category, str(outcome.error))
    return encode_sample(outcome, request)
