"""Samples in flight and results of samples, in memory. After a crash, clients submit lost samples again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import structlog
from tinsmith_rpc import tracing, worker_pb2

from tinsmith_trainer.errors import (
    Draining,
    Failure,
    SamplerClosed,
    SamplerUnready,
    ServerError,
    StorageUnavailable,
    TrainerError,
    UserError,
)
from tinsmith_trainer.process.usage_meter import UsageMeter
from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, SampleOutcome, Sampler
from tinsmith_trainer.sampling.checks import check_echo, with_token_behind
from tinsmith_trainer.sampling.codec import decode_sample, encode_sample, unpacked_bytes
from tinsmith_trainer.sampling.constraints.constraint import decode_constraint
from tinsmith_trainer.sampling.ended_samples import EndedSamples, SampleClient
from tinsmith_trainer.sampling.load import SamplerLoad
from tinsmith_trainer.sampling.readings import Reading
from tinsmith_trainer.sampling.sampler_adapters import AdapterInUse, SamplerAdapters
from tinsmith_trainer.sampling.tenant_shares import KeptResults, SharedQuota

log = structlog.get_logger(__name__)

STORAGE_PAUSE_SECONDS = 2.0
"""The time for which a sample waits if the adapter cannot be read yet.

After this time, the client must submit the sample again.
"""

SPANS_KEPT = 10_000
"""The number of ended samples in the timeline. The timeline takes some megabytes."""

UNFETCHED_SECONDS = 60.0
"""The maximum time for which a drain waits until results are fetched. A running client asks every 25 s."""


class TooManySamples(Exception):
    """An error for a sample that is refused because too many samples wait.

    The client should wait for a second, and then send the same request again.
    """


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits on waiting samples of all tenants together.

    A single tenant may use half of each limit for waiting samples.

    `waiting_bytes` limits the size of prompts, answers and target tokens. A sparse tensor of a few bytes may contain
    many target tokens.
    """

    waiting_samples: int = 16384
    waiting_bytes: int = 1024**3
    result_bytes: int = 512 * 1024**2
    result_seconds: float = 3600.0


State = Literal["running", "ended", "fetched", "forgotten", "dropped"]
"""`ended`: the result is not fetched yet. `fetched`: the result is kept, because a client may ask again.

`forgotten`: the result was deleted. `dropped`: the sample has no result, and the client must submit the request again.
"""


@dataclass(slots=True)
class _Sample:
    """A sample request, from the submission until the result is forgotten."""

    request_id: str
    tenant: str
    nbytes: int
    state: State = "running"
    result: bytes | Failure | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    adapter: AdapterInUse | None = None
    cancelled: bool = False
    submitted_at: float = field(default_factory=time.time)  # Unix seconds
    reading: Reading | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Read:
    """The new text of a sample since the reader's previous read. `result` is None while the sample runs.

    `tokens` counts the tokens drawn so far. `with_sequences` means that the reader needs the tokens of the result, too.
    """

    pieces: Sequence[worker_pb2.TextPiece]
    tokens: int
    result: bytes | Failure | None
    with_sequences: bool


class Samples:
    """The samples of a sampler. Results of samples are kept for an hour. Used on one event loop."""

    def __init__(
        self,
        sampler: Sampler,
        adapters: SamplerAdapters,
        limits: QueueLimits | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """Create the queue. `usage` is the meter that counts samples."""
        limits = limits or QueueLimits()
        self.adapters = adapters
        self.sampler = sampler
        self.usage = usage or UsageMeter()
        self.load = SamplerLoad()
        self._timeline: deque[worker_pb2.Span] = deque(maxlen=SPANS_KEPT)
        self._samples: dict[str, _Sample] = {}
        self._kept = KeptResults(limits.result_bytes, limits.result_seconds)
        self._sample_quota = SharedQuota(limits.waiting_samples)
        self._byte_quota = SharedQuota(limits.waiting_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._drain_tracker = DrainTracker()
        self._ended = EndedSamples()
        self._draining = False

    def submit(self, request: worker_pb2.SampleRequest, tenant: str, traceparent: str = "") -> None:
        """Submit a sample. A repeated request_id refers to the same sample. `traceparent` affects only traces.

        Raises Draining, SamplerUnready, and TooManySamples if the tenant has too many samples.
        """
        if request.request_id in self._samples:
            return
        if self._draining:
            raise Draining("this sampler is shutting down, and takes no more samples")
        if (reason := self.sampler.unready_reason) is not None:
            raise SamplerUnready(reason)
        nbytes = unpacked_bytes(request)
        if not (self._sample_quota.fits(tenant, 1) and self._byte_quota.fits(tenant, nbytes)):
            raise TooManySamples(
                "this sampler has as many of your samples as it takes; send it again when some are done"
            )
        self._forget_old()
        reading = Reading() if request.HasField("reading") else None
        sample = self._samples[request.request_id] = _Sample(
            request.request_id, tenant, nbytes, reading=reading, traceparent=traceparent
        )
        self._sample_quota.take(tenant, 1)
        self._byte_quota.take(tenant, nbytes)
        self._drain_tracker.took()
        self.load.took(request.request_id)
        if request.HasField("rejection"):
            self._finish(sample, Failure("user", request.rejection.message))
            return
        self._run(self._start(request))

    def prepare(self, adapter: worker_pb2.AdapterRef) -> None:
        """Load an adapter before samples with this adapter arrive."""
        if not self._draining:
            self.adapters.prepare(adapter)

    async def wait(self, request_id: str, timeout_seconds: float) -> bytes | Failure | None:
        """Return the result, or None if the sample has no result before the timeout.

        Raises KeyError for unknown or lost samples.
        """
        sample = self._samples[request_id]
        if not sample.finished.is_set():  # with a timeout of 0, wait_for would not check the event at all
            try:
                async with asyncio.timeout(timeout_seconds):
                    await sample.finished.wait()
            except TimeoutError:
                return None
        if sample.result is None:
            raise KeyError(request_id)
        self._note_fetched(sample)
        self._ended.forget(request_id)
        return sample.result

    async def ended(self, request: worker_pb2.AwaitSamplesRequest) -> worker_pb2.AwaitSamplesReply:
        """Return the ended samples of one client, with the rounds of `EndedSamples`."""
        client = SampleClient(request.sampling_session_id, request.client)
        lost = [one for one in request.expected if one not in self._samples]
        is_any = bool(lost) or await self._ended.any(client, request.seen, request.timeout_seconds)
        if not request.round:
            return worker_pb2.AwaitSamplesReply(any=is_any)
        reported, round = self._ended.report(client, request.seen, request.round)
        ended = [self._as_ended(one) for one in dict.fromkeys([*reported, *lost])]
        return worker_pb2.AwaitSamplesReply(any=bool(ended), ended=ended, round=round)

    async def read(self, request_id: str, seen: int, timeout_seconds: float) -> Read:
        """Return the pieces after the first `seen` pieces, as soon as new pieces exist.

        Raises KeyError for unknown or lost samples, and for samples without a text.
        """
        sample = self._samples[request_id]
        if sample.reading is None:
            raise KeyError(request_id)
        if not sample.finished.is_set():
            await sample.reading.grown(seen, timeout_seconds)
        if sample.finished.is_set():
            if sample.result is None:
                raise KeyError(request_id)
            self._note_fetched(sample)
        reading = sample.reading
        return Read(reading.behind(seen), reading.tokens, sample.result, reading.with_sequences)

    def cancel(self, request_id: str) -> None:
        """Cancel a sample. Unknown IDs are ignored."""
        sample = self._samples.get(request_id)
        if sample is not None:
            sample.cancelled = True
            self._note_fetched(sample)
            self.sampler.cancel(request_id)

    def stop_taking(self) -> None:
        """Refuse new samples. Accepted samples continue, and clients can fetch the results."""
        self._draining = True

    async def drained(self) -> None:
        """Wait until all samples are done and all results are fetched, or until the time for fetching ends."""
        await self._drain_tracker.complete()

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def unfinished(self) -> int:
        return self._drain_tracker.running

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, request: worker_pb2.SampleRequest) -> None:
        """Prepare a sample, and submit the sample to the sampler.

        Every error that is not temporary becomes the result of the sample, because the sample would otherwise never
        end.
        """
        request_id = request.request_id
        sample = self._samples[request_id]

        def done(outcome: SampleOutcome) -> None:
            self._loop.call_soon_threadsafe(self._end, request, outcome)

        try:
            if request.adapter.directory:
                sample.adapter = await self.adapters.take(request.adapter, sample.tenant)
            await self.adapters.read_assets(request, sample.tenant)
            job = decode_sample(request, sample.tenant)
            if request.HasField("constraint"):
                job = await asyncio.to_thread(self._constrained, job, request)
            if sample.reading is not None:
                job = await self._read_while_drawn(sample.reading, job, request.reading)
            if sample.cancelled:
                raise UserError("The request was cancelled.")
            self.sampler.submit(job, done)
        except StorageUnavailable:
            await asyncio.sleep(STORAGE_PAUSE_SECONDS)
            self._enter(sample, "dropped")
        except TrainerError as error:
            self._end(request, SampleOutcome(error=error))
        except Exception as error:
            log.exception("a sample could not be started", request_id=request_id)
            self._finish(sample, Failure("server", f"{type(error).__name__}: {error}"))

    def _constrained(self, job: SampleJob, request: worker_pb2.SampleRequest) -> SampleJob:
        """Return the job with its compiled constraint. Runs in a thread, because a large schema takes a second."""
        constraint = decode_constraint(request, self.sampler.language, job.prompt)
        return self.sampler.prepared(replace(job, params=replace(job.params, constraint=constraint)))

    async def _read_while_drawn(self, reading: Reading, job: SampleJob, options: worker_pb2.Reading) -> SampleJob:
        language = self.sampler.language
        if language is None:
            raise UserError("This sampler knows tokens alone, and gives no text. Ask it for tokens.")
        if options.echo and options.logprobs:
            check_echo(job)
        try:
            await asyncio.to_thread(reading.begin, language, job, options)
        except ValueError as error:
            raise UserError(f"The sample cannot be read as text: {error}") from error

        def drawn(index: int, token: DrawnToken) -> None:
            self._loop.call_soon_threadsafe(reading.drawn, index, token)

        return replace(job, drawn=drawn)

    def _end(self, request: worker_pb2.SampleRequest, outcome: SampleOutcome) -> None:
        reading = self._samples[request.request_id].reading
        if reading is None or outcome.error is not None:
            self._settle(request, outcome)
        else:
            self._run(self._end_in_words(reading, request, with_token_behind(request, outcome)))

    async def _end_in_words(self, reading: Reading, request: worker_pb2.SampleRequest, outcome: SampleOutcome) -> None:
        """Finish the text of the sample.

        If the text cannot be finished, the sample fails. The quota of the sample is released in any case.
        """
        try:
            await reading.finish(outcome)
        except Exception as error:
            log.exception("a sample could not be read as text", request_id=request.request_id)
            what = f"The sample was drawn and could not be read as text ({type(error).__name__}: {error})."
            failed = ServerError(f"{what} Send it again, or ask for tokens.")
            outcome = SampleOutcome(error=failed, started_at=outcome.started_at)
        self._settle(request, outcome)

    def _settle(self, request: worker_pb2.SampleRequest, outcome: SampleOutcome) -> None:
        sample = self._samples[request.request_id]
        if isinstance(outcome.error, SamplerClosed):
            self._enter(sample, "dropped")
            return
        self._note(request, sample, outcome)
        self._finish(sample, _as_result(outcome, request))

    def timeline(self, session_id: str) -> list[worker_pb2.Span]:
        """Return the newest ended samples of the session."""
        return [span for span in self._timeline if span.owner.startswith(f"{session_id}:")]

    def _note(self, request: worker_pb2.SampleRequest, sample: _Sample, outcome: SampleOutcome) -> None:
        """Record the sample in the timeline. Record the usage if the sample did not fail."""
        span = worker_pb2.Span(
            owner=request.sampling_session_id,
            request_id=request.request_id,
            name="sample",
            submitted=sample.submitted_at,
            started=outcome.started_at,
            ended=time.time(),
            failed=outcome.error is not None,
        )
        self._timeline.append(span)
        if sample.traceparent:
            _record_in_trace(sample.traceparent, span)
        if outcome.error is not None:
            return
        cached = min(outcome.prompt_cache_hit_tokens, outcome.prompt_tokens)
        for kind, tokens in (
            (worker_pb2.PREFILLED_TOKENS, outcome.prompt_tokens - cached),
            (worker_pb2.CACHED_PREFILL_TOKENS, cached),
            (worker_pb2.SAMPLED_TOKENS, sum(len(sequence.tokens) for sequence in outcome.sequences)),
        ):
            self.usage.add(request.sampling_session_id, sample.tenant, kind, tokens)

    # ---- states

    def _finish(self, sample: _Sample, result: bytes | Failure) -> None:
        sample.result = result
        self._enter(sample, "ended")
        if sample.cancelled:
            self._note_fetched(sample)
        self._forget_old()

    def _note_fetched(self, sample: _Sample) -> None:
        """Note that the result was fetched, or that no client needs the result. Repeated calls have no effect."""
        if sample.state == "ended":
            self._enter(sample, "fetched")

    def _forget_old(self) -> None:
        """Forget results that are too old or too large.

        A call that waits for a forgotten result can still return the result, because the call has a reference to the
        sample.
        """
        for request_id in self._kept.forget(time.monotonic()):
            self._enter(self._samples[request_id], "forgotten")

    def _enter(self, sample: _Sample, state: State) -> None:
        """Move the sample to another state. Update all objects that depend on the states of samples."""
        before, sample.state = sample.state, state
        if state == "ended":
            unseen_bytes = sample.reading.nbytes if sample.reading is not None else 0
            self._kept.add(sample.request_id, sample.tenant, _size(sample.result) + unseen_bytes, time.monotonic())
            self._drain_tracker.finished()
            self._ended.note(sample.request_id)
        elif state == "dropped":
            del self._samples[sample.request_id]
            self._drain_tracker.dropped()
            self._ended.note_lost(sample.request_id)
        elif before == "ended":  # the result was fetched, or it is forgotten before any client fetched it
            self._drain_tracker.settled()
        if state == "forgotten":
            del self._samples[sample.request_id]
            self._ended.forget(sample.request_id)
        if before == "running":
            self._release(sample)

    def _release(self, sample: _Sample) -> None:
        """Release the quota and the adapter of a running sample. Wake all calls that wait for the sample."""
        self._sample_quota.give_back(sample.tenant, 1)
        self._byte_quota.give_back(sample.tenant, sample.nbytes)
        self.load.ended(sample.request_id)
        sample.finished.set()
        if sample.reading is not None:
            sample.reading.ended()
        if sample.adapter is not None:
            self.adapters.give_back(sample.adapter, sample.tenant)
            sample.adapter = None

    def _as_ended(self, request_id: str) -> worker_pb2.EndedSample:
        sample = self._samples.get(request_id)
        if sample is None or not isinstance(sample.result, bytes):
            return worker_pb2.EndedSample(request_id=request_id, failed=True)
        return worker_pb2.EndedSample(request_id=request_id, size_bytes=len(sample.result))


class DrainTracker:
    """A tracker of samples during a shutdown: the sampler must run until these samples are fetched.

    Used on one event loop. By default, the clock is the clock of the event loop.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self.running = 0
        self._unfetched = 0
        self._last_finish = -math.inf
        self._changed = asyncio.Event()

    def took(self) -> None:
        self.running += 1

    def finished(self) -> None:
        """Note that a sample has ended. The result of the sample is not fetched yet."""
        self.running -= 1
        self._unfetched += 1
        self._last_finish = self._clock()
        self._changed.set()

    def settled(self) -> None:
        """Note that a result was fetched, or that no client will fetch the result."""
        self._unfetched -= 1
        self._changed.set()

    def dropped(self) -> None:
        """Note that a sample has ended without a result."""
        self.running -= 1
        self._changed.set()

    def remaining_seconds(self) -> float:
        """Return how many seconds the process must continue to run.

        The number is 0 if no sample needs the process, and infinite while a sample runs.
        """
        if self.running:
            return math.inf
        if not self._unfetched:
            return 0.0
        return max(0.0, self._last_finish + UNFETCHED_SECONDS - self._clock())

    async def complete(self) -> None:
        """Wait until the process may exit. Samples that are submitted in the meantime are also awaited."""
        while (remaining := self.remaining_seconds()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if math.isinf(remaining) else remaining):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _size(result: bytes | Failure | None) -> int:
    assert result is not None, "a sample that has ended has a result"
    return len(result.message) if isinstance(result, Failure) else len(result)


def _as_result(outcome: SampleOutcome, request: worker_pb2.SampleRequest) -> bytes | Failure:
    if outcome.error is not None:
        return Failure(outcome.error.category, str(outcome.error))
    return encode_sample(outcome, request)


def _record_in_trace(traceparent: str, span: worker_pb2.Span) -> None:
    """Record a sample that has ended: its wait, and its time in the sampler."""
    about = {"tinsmith.sampling_session_id": span.owner, "tinsmith.request_id": span.request_id}
    failure = "the sample failed" if span.failed else ""
    whole = tracing.record(span.name, traceparent, span.submitted, span.ended, about, failure)
    started = span.started or span.ended
    tracing.record("wait for the sampler", whole, span.submitted, started)
    tracing.record("sampler", whole, started, span.ended)
