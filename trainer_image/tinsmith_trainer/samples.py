"""Samples in flight and their results, in memory: a crash forgets them, and clients submit again."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints import CheckpointRoot
from tinsmith_trainer.codec import encode_sample
from tinsmith_trainer.engines.base import AdapterState, BaseModelInfo
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.executor import SavedWeights
from tinsmith_trainer.operations import Failure, Success
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sampler, SamplingParams

log = structlog.get_logger(__name__)

MAX_WAITING_SAMPLES = 8192
KEEP_RESULTS_SECONDS = 3600.0
KEEP_RESULT_BYTES = 512 * 1024 * 1024
RECENT_SAVE_BYTES = 1024**3
LOADED_ADAPTERS = 64


class TooManySamples(Exception):
    """The client should hold back for a second and send the same request again."""


@dataclass(slots=True)
class _Sample:
    result: Success | Failure | None = None
    finished_at: float = 0.0
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Samples:
    """Takes sample requests, loads the adapters they name, keeps the results for an hour. One event loop's."""

    def __init__(self, sampler: Sampler, checkpoints: CheckpointRoot, base: BaseModelInfo) -> None:
        self._sampler = sampler
        self._checkpoints = checkpoints
        self._base = base
        self._samples: dict[str, _Sample] = {}
        self._finished: deque[str] = deque()  # oldest result first
        self._result_bytes = 0
        self._recent: OrderedDict[str, AdapterState] = OrderedDict()
        self._loaded: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def remember_saved(self, saved: SavedWeights) -> None:
        """Weights that were just saved need not be read back. Called from any thread."""
        self._loop.call_soon_threadsafe(self._keep_recent, saved)

    def submit(self, request: worker_pb2.SampleRequest) -> None:
        """The same request_id again is the same sample. Raises TooManySamples."""
        if request.request_id in self._samples:
            return
        if self.unfinished >= MAX_WAITING_SAMPLES:
            raise TooManySamples
        self._forget_old()
        self._samples[request.request_id] = _Sample()
        if request.HasField("rejection"):
            self._finish(request.request_id, Failure("user", request.rejection.message))
            return
        task = self._loop.create_task(self._start(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self, request_id: str, timeout_seconds: float) -> Success | Failure | None:
        """The result, or None when it is not there in time. Raises KeyError for ids that are not known."""
        sample = self._samples[request_id]
        if sample.result is not None:
            return sample.result  # also with a timeout of 0, which wait_for would not grant a single look
        try:
            await asyncio.wait_for(sample.finished.wait(), timeout_seconds)
        except TimeoutError:
            return None
        return sample.result

    def cancel(self, request_id: str) -> None:
        self._sampler.cancel(request_id)

    @property
    def unfinished(self) -> int:
        return len(self._samples) - len(self._finished)

    def _keep_recent(self, saved: SavedWeights) -> None:
        self._recent[saved.written.manifest_digest] = saved.state
        while len(self._recent) > 1 and sum(map(_state_bytes, self._recent.values())) > RECENT_SAVE_BYTES:
            self._recent.popitem(last=False)

    async def _start(self, request: worker_pb2.SampleRequest) -> None:
        """Whatever goes wrong here is the sample's failure: nobody else would ever finish it."""

        def done(outcome: SampleOutcome) -> None:
            self._loop.call_soon_threadsafe(self._finish, request.request_id, _as_result(outcome))

        try:
            if request.adapter.directory:
                await self._loading(request.adapter)
            self._sampler.submit(_job(request), done)
        except TrainerError as error:
            self._finish(request.request_id, Failure(error.category, str(error)))
        except Exception as error:
            log.exception("a sample could not be started", request_id=request.request_id)
            self._finish(request.request_id, Failure("server", f"{type(error).__name__}: {error}"))

    def _loading(self, adapter: worker_pb2.AdapterRef) -> asyncio.Task[None]:
        key = adapter.manifest_digest
        task = self._loaded.get(key)
        if task is None or (task.done() and task.exception() is not None):
            task = self._loaded[key] = self._loop.create_task(self._load(adapter))
        self._loaded.move_to_end(key)
        while len(self._loaded) > LOADED_ADAPTERS:
            oldest, _ = self._loaded.popitem(last=False)
            self._sampler.drop_adapter(oldest)
        return task

    async def _load(self, adapter: worker_pb2.AdapterRef) -> None:
        key = adapter.manifest_digest
        state = self._recent.pop(key, None)
        if state is None:
            loaded = await asyncio.to_thread(self._checkpoints.read, adapter.directory, key, self._base)
            state = loaded.state
        await asyncio.to_thread(self._sampler.load_adapter, key, state)

    def _finish(self, request_id: str, result: Success | Failure) -> None:
        sample = self._samples[request_id]
        sample.result, sample.finished_at = result, time.monotonic()
        sample.finished.set()
        self._result_bytes += _size(result)
        self._finished.append(request_id)

    def _forget_old(self) -> None:
        """Oldest result first, while they are past their time or too large together."""
        horizon = time.monotonic() - KEEP_RESULTS_SECONDS
        while self._finished:
            sample = self._samples[self._finished[0]]
            if sample.finished_at >= horizon and self._result_bytes <= KEEP_RESULT_BYTES:
                return
            assert sample.result is not None
            self._result_bytes -= _size(sample.result)
            del self._samples[self._finished.popleft()]


def _state_bytes(state: AdapterState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values())


def _size(result: Success | Failure) -> int:
    return len(result.payload) if isinstance(result, Success) else len(result.message)


def _as_result(outcome: SampleOutcome) -> Success | Failure:
    if outcome.error is not None:
        return Failure(outcome.error.category, str(outcome.error))
    return Success(encode_sample(outcome), protobuf=True)


def _job(request: worker_pb2.SampleRequest) -> SampleJob:
    return SampleJob(
        request_id=request.request_id,
        adapter_key=request.adapter.manifest_digest if request.adapter.directory else "",
        prompt=np.frombuffer(request.prompt_tokens, dtype="<i4"),
        params=SamplingParams(
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            seed=request.seed if request.HasField("seed") else None,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            stop_tokens=tuple(request.stop_tokens) if request.has_stop else None,
            stop_strings=tuple(request.stop_strings) if request.has_stop else None,
        ),
        num_samples=request.num_samples,
        prompt_logprobs=request.prompt_logprobs,
        prompt_logprobs_last_n=(request.prompt_logprobs_last_n if request.HasField("prompt_logprobs_last_n") else None),
    )
