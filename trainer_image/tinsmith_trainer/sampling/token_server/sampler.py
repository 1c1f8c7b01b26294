"""The sampler for a token server. Each job becomes calls on an event loop, which runs in a separate thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Items
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import structlog
from typing_extensions import override

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import SamplerClosed, ServerError, TrainerError, UserError
from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, SampleOutcome, Sampler, SamplerStats
from tinsmith_trainer.sampling.constraints.grammars import Grammars
from tinsmith_trainer.sampling.model_language import ModelLanguage
from tinsmith_trainer.sampling.token_server.adapters import (
    AdapterFilesLost,
    AdapterFolders,
    ServedAdapter,
    check_adapter,
)
from tinsmith_trainer.sampling.token_server.admission import Admission
from tinsmith_trainer.sampling.token_server.base import (
    MOST_DRAWS,
    Generation,
    GenerationRequest,
    OnToken,
    TokenServer,
    cache_salt_of,
)
from tinsmith_trainer.sampling.token_server.generation_requests import Plan, outcome_of, plan_generation_requests
from tinsmith_trainer.sampling.token_server.http import LoopThread
from tinsmith_trainer.sampling.token_server.readiness import PROBE_KEY, PROBE_SECONDS, Readiness, probe_state
from tinsmith_trainer.sampling.token_server.served_model import ServedModel

log = structlog.get_logger(__name__)

Done = Callable[[SampleOutcome], None]
Draw = tuple[GenerationRequest, OnToken | None]
"""A request, and the listener to its tokens."""


class TokenServerSampler(Sampler):
    """A sampler that uses a running token server.

    The sampler's thread owns `server`, and runs `on_close` at the end.
    """

    def __init__(
        self,
        server: TokenServer,
        model: ServedModel,
        folders: AdapterFolders,
        thread: LoopThread,
        on_close: Callable[[], Coroutine[Any, Any, None]],
        most_draws: int = MOST_DRAWS,
        readiness: Readiness | None = None,
    ) -> None:
        self._server = server
        self._model = model
        self._language = ModelLanguage(
            model.tokenizer, model.eos_token_ids, model.directory, model.info.max_sequence_length
        )
        self._grammars = Grammars(self._language, model.info.vocab_size)
        self._folders = folders
        self._thread = thread
        self._on_close = on_close
        self._counters = Counters()
        self._guard = threading.Lock()
        self._adapters: dict[str, ServedAdapter] = {}
        self._closed = False
        self._loading: set[Future[None]] = set()
        self._unloading: set[asyncio.Task[None]] = set()  # used by the thread
        self._admission = Admission(most_draws)
        self._readiness = readiness or Readiness()
        self._probe_state = probe_state(model)
        self._probing: asyncio.Task[None] | None = None  # used by the thread
        self._running: dict[asyncio.Task[SampleOutcome], str] = {}  # used by the thread; request IDs

    @property
    @override
    def language(self) -> ModelLanguage:
        return self._language

    @property
    @override
    def unready_reason(self) -> str | None:
        return self._readiness.reason

    @override
    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        """Load an adapter.

        Raises ServerError if the weights do not fit the base model, UserError if the server cannot serve the adapter,
        and SamplerClosed if the server loads no adapter. After SamplerClosed, clients send the sample to another
        sampler.
        """
        if self.has_adapter(adapter_key):
            return
        self._check_open()
        check_adapter(adapter_key, state, self._model)
        if (failure := self._readiness.load_failure) is not None:
            raise SamplerClosed(failure)
        try:
            adapter = self._write_and_load(adapter_key, state)
        except (SamplerClosed, AdapterFilesLost):
            raise
        except TrainerError as error:
            raise self._with_cause(error) from error
        with self._guard:
            known = self._adapters.setdefault(adapter_key, adapter)
        if known is not adapter:
            self._thread.soon(self._start_unload, adapter)

    def _write_and_load(self, adapter_key: str, state: AdapterState) -> ServedAdapter:
        """Load the adapter under a new name. Raises TrainerError with the key of the adapter."""
        adapter = self._folders.write(adapter_key, state, self._model)
        try:
            self._load(adapter)
        except TrainerError as error:
            raise self._not_loaded(adapter_key, adapter, error) from error
        return adapter

    def _with_cause(self, error: TrainerError) -> TrainerError:
        """Return the error of an adapter that was not loaded, after a probe of the server.

        If the probe fails, too, the server is the cause. The sampler then gets no samples until a probe succeeds.
        """
        if self._probe_state is None:
            return error
        failure = self._probe(self._probe_state)
        if self._readiness.note_probe(failure):
            self._thread.soon(self._start_probing, self._probe_state)
        if failure is not None:
            return SamplerClosed(self._readiness.load_failure or failure)
        if isinstance(error, UserError):
            return error
        return ServerError(f"{error} The server loads other adapters: save these weights again, and sample from them.")

    def check_probe(self) -> None:
        """Run the probe once at the start. A probe that this server does not accept is never used."""
        if self._probe_state is not None and (failure := self._probe(self._probe_state)) is not None:
            log.warning("a probe of the hot swap failed at the start, and is not used", reason=failure)
            self._probe_state = None

    def _probe(self, state: AdapterState) -> str | None:
        """Load and unload the probe. Return the reason if the server does not load it."""
        try:
            adapter = self._write_and_load(PROBE_KEY, state)
        except TrainerError as error:
            return str(error)
        self._thread.soon(self._start_unload, adapter)
        return None

    def _not_loaded(self, adapter_key: str, adapter: ServedAdapter, error: TrainerError) -> TrainerError:
        """Return the error for an adapter that was not loaded.

        Servers report a missing folder and a refused adapter in the same way.
        """
        is_missing = not adapter.folder.exists()
        self._folders.remove(adapter)
        if is_missing and not isinstance(error, SamplerClosed):
            return AdapterFilesLost(
                f"Adapter {adapter_key} was not loaded: {adapter.folder} is gone, in which it was for the server to "
                f"read. Let nothing else use this sampler's scratch folder, and send the request again. {error}"
            )
        return type(error)(f"Adapter {adapter_key} was not loaded. {error}")

    def _load(self, adapter: ServedAdapter) -> None:
        """Load the adapter into the server. `close` cancels the load."""
        with self._guard:
            self._check_open()
            loading = self._thread.begin(self._load_after_unloads(adapter))
            self._loading.add(loading)
        try:
            loading.result()
        except CancelledError:
            raise SamplerClosed("The sampler was closed meanwhile; send the request again.") from None
        finally:
            self._loading.discard(loading)

    async def _load_after_unloads(self, adapter: ServedAdapter) -> None:
        """Load the adapter as soon as the server has room for it.

        If the server had one adapter too many, it would evict an arbitrary adapter, and wait until no sample uses the
        evicted adapter.
        """
        await asyncio.gather(*self._unloading, return_exceptions=True)
        await self._server.load_adapter(adapter.name, adapter.folder)

    def _check_open(self) -> None:
        if self._closed:
            raise SamplerClosed("The sampler is closed; send the request again.")

    @override
    def has_adapter(self, adapter_key: str) -> bool:
        with self._guard:
            return adapter_key == "" or adapter_key in self._adapters

    @override
    def drop_adapter(self, adapter_key: str) -> None:
        """Drop an adapter. Jobs that were submitted earlier keep this version. Unknown keys are ignored."""
        with self._guard:
            adapter = self._adapters.pop(adapter_key, None)
            if adapter is None:
                return
            adapter.dropped = True
            can_go = adapter.can_go and not self._closed
        if can_go:
            self._thread.soon(self._start_unload, adapter)

    @override
    def prepared(self, job: SampleJob) -> SampleJob:
        constraint = job.params.constraint
        return job if constraint is None else replace(job, grammar=self._grammars.compiled(constraint))

    @override
    def submit(self, job: SampleJob, done: Done) -> None:
        """Submit a job. After `close`, the call of `done` happens immediately in the caller's thread."""
        with self._guard:
            closed, adapter = self._closed, self._adapters.get(job.adapter_key)
            if adapter is not None:
                adapter.jobs += 1
            if not closed:
                self._counters.waits()
                self._thread.soon(self._begin, job, adapter, done)
        if closed:
            done(SampleOutcome(error=SamplerClosed("The sampler is closed; send the request again.")))

    @override
    def cancel(self, request_id: str) -> None:
        self._thread.soon(self._cancel, request_id)

    @override
    def stats(self) -> SamplerStats:
        """Return the numbers of active and waiting jobs, and the tokens and busy seconds since the start."""
        return self._counters.stats()

    @override
    def close(self) -> None:
        with self._guard:
            first, self._closed = not self._closed, True
        if first:
            self._thread.call(self._close())
            self._thread.stop()
            self._folders.remove_all()

    # ---- on the thread

    def _begin(self, job: SampleJob, adapter: ServedAdapter | None, done: Done) -> None:
        self._counters.begins()
        task = asyncio.get_running_loop().create_task(self._outcome(job, adapter))
        self._running[task] = job.request_id
        # The callback is not in the task, because the task may be cancelled before its first line.
        task.add_done_callback(lambda task: self._finish(task, adapter, done))

    def _finish(self, task: asyncio.Task[SampleOutcome], adapter: ServedAdapter | None, done: Done) -> None:
        request_id = self._running.pop(task)
        self._counters.ends()
        self._release(adapter)
        _answer(done, self._result(task, request_id))

    def _result(self, task: asyncio.Task[SampleOutcome], request_id: str) -> SampleOutcome:
        if task.cancelled():
            return SampleOutcome(error=self._why_cancelled())
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, TrainerError):
            return SampleOutcome(error=error)
        log.error("a sample failed", request_id=request_id, exc_info=error)
        return SampleOutcome(error=ServerError(f"Sampling failed: {type(error).__name__}: {error}"))

    async def _outcome(self, job: SampleJob, adapter: ServedAdapter | None) -> SampleOutcome:
        if job.adapter_key and adapter is None:
            raise UserError(f"Adapter {job.adapter_key} is not loaded; it was dropped or never saved for sampling.")
        head = adapter is not None and adapter.trains_head
        plan = plan_generation_requests(
            job,
            adapter.name if adapter is not None else None,
            self._model,
            head=head,
            scored_by_prefixes=head and not self._server.scores_heads,
        )
        started_at = time.time()
        drawn, behind = await self._draw_all(plan)
        outcome = replace(outcome_of(plan, drawn, behind, self._model), started_at=started_at)
        self._counters.drew(plan, outcome)
        return outcome

    async def _draw_all(self, plan: Plan) -> tuple[list[Generation], list[Generation]]:
        """Draw the samples of the plan, and the prefixes of the prompt.

        The longest prefix is drawn first. After this draw, all other prefixes are in the server's prefix cache.
        """
        tenant = plan.job.tenant
        prefixes: list[Draw] = [(one.request, None) for one in plan.prefixes]
        samples = [(request, self._listener(plan, index)) for index, request in enumerate(plan.requests)]
        longest = await self._draw_together(prefixes[:1], tenant)
        others = await self._draw_together([*prefixes[1:], *samples], tenant)
        rest = len(prefixes) - len(longest)
        return others[rest:], longest + others[:rest]

    def _listener(self, plan: Plan, index: int) -> OnToken | None:
        """Return the function that passes tokens to the reader of a sequence, up to the sequence's end."""
        pass_on = plan.job.drawn
        if pass_on is None or not plan.max_tokens:
            return None
        watch = plan.rule.watch(self._model.tokenizer, plan.job.prompt)
        ended = False

        def hear(drawn: DrawnToken) -> None:
            nonlocal ended
            if not ended:
                pass_on(index, drawn)
                ended = watch.sees_end(drawn.token)

        return hear

    async def _draw_together(self, requests: Items[Draw], tenant: str) -> list[Generation]:
        """Draw all requests. After the first failure, all other requests are cancelled.

        Raises the error of the first failure, or SamplerClosed if the server is failing. After SamplerClosed, clients
        submit the job to another sampler.
        """
        try:
            async with asyncio.TaskGroup() as group:
                draws = [group.create_task(self._draw(request, drawn, tenant)) for request, drawn in requests]
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
            if isinstance(error, ServerError) and not await self._server.is_healthy():
                raise SamplerClosed(str(error)) from None
            raise error from None
        return [draw.result() for draw in draws]

    async def _draw(self, request: GenerationRequest, drawn: OnToken | None, tenant: str) -> Generation:
        async with self._admission.turn(tenant, len(request.prompt) + request.max_tokens):
            return await self._server.draw(replace(request, cache_salt=cache_salt_of(tenant)), drawn)

    def _cancel(self, request_id: str) -> None:
        for task, running in self._running.items():
            if running == request_id:
                task.cancel()

    def _why_cancelled(self) -> TrainerError:
        if self._closed:
            return SamplerClosed("The sampler was closed before the request was done; send it again.")
        return UserError("The request was cancelled.")

    def _release(self, adapter: ServedAdapter | None) -> None:
        if adapter is None:
            return
        # This also guards the answer: if a drop and the last job coincide, only one of them unloads the adapter.
        with self._guard:
            adapter.jobs -= 1
            can_go = adapter.can_go and not self._closed
        if can_go:
            self._thread.soon(self._start_unload, adapter)

    def _start_unload(self, adapter: ServedAdapter) -> None:
        task = asyncio.get_running_loop().create_task(self._unload(adapter))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload(self, adapter: ServedAdapter) -> None:
        """Unload the adapter.

        The server may have lost the adapter, for example by a restart. The folder is removed in any case.
        """
        try:
            await self._server.unload_adapter(adapter.name)
        except TrainerError as error:
            log.warning("an adapter could not be unloaded", adapter=adapter.name, error=str(error))
        await asyncio.to_thread(self._folders.remove, adapter)

    def _start_probing(self, state: AdapterState) -> None:
        self._probing = asyncio.get_running_loop().create_task(self._probe_until_loaded(state))

    async def _probe_until_loaded(self, state: AdapterState) -> None:
        while self._readiness.load_failure is not None:
            await asyncio.sleep(PROBE_SECONDS)
            self._readiness.note_probe(await asyncio.to_thread(self._probe, state))

    async def _close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        running = list(self._running)
        for task in running:
            task.cancel()
        for loading in tuple(self._loading):
            loading.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # wait until their answers are given
        await self._server.close()
        await self._on_close()


class Counters:
    """Counters that this process keeps, because versions of the servers report different numbers. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = threading.Lock()
        self._clock = clock
        self._waiting = self._active = 0
        self._sampled_tokens = self._prefilled_tokens = self._prefix_hit_tokens = 0
        self._busy_seconds = self._busy_since = 0.0

    def waits(self) -> None:
        with self._guard:
            self._waiting += 1

    def begins(self) -> None:
        with self._guard:
            self._waiting -= 1
            self._active += 1
            if self._active == 1:
                self._busy_since = self._clock()

    def ends(self) -> None:
        with self._guard:
            self._active -= 1
            if not self._active:
                self._busy_seconds += self._clock() - self._busy_since

    def drew(self, plan: Plan, outcome: SampleOutcome) -> None:
        """Count a job. The samples of a job share the prompt, so the prompt counts once."""
        computed = bool(plan.requests or plan.prefixes)
        hit = outcome.prompt_cache_hit_tokens
        with self._guard:
            self._sampled_tokens += sum(len(sequence.tokens) for sequence in outcome.sequences)
            self._prefix_hit_tokens += hit
            self._prefilled_tokens += len(plan.job.prompt) - hit if computed else 0

    def stats(self) -> SamplerStats:
        with self._guard:
            running = self._clock() - self._busy_since if self._active else 0.0
            return SamplerStats(
                active=self._active,
                waiting=self._waiting,
                sampled_tokens=self._sampled_tokens,
                prefilled_tokens=self._prefilled_tokens,
                prefix_hit_tokens=self._prefix_hit_tokens,
                busy_seconds=self._busy_seconds + running,
            )


def _answer(done: Done, outcome: SampleOutcome) -> None:
    try:
        done(outcome)
    except Exception:  # an error in the caller's function must not end the sampler's thread
        log.exception("sample_callback_failed")
