"""The sampler's thread: continuous batching.

Each round takes what came in, computes a bounded number of prompt blocks, and draws one token for
every running sample. Jobs start in order; a job is passed over only while its own batch is full.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import structlog

from tinsmith_trainer.errors import SamplerClosed, ServerError, TrainerError, UserError
from tinsmith_trainer.sampling.base import SampleOutcome, SamplerStats
from tinsmith_trainer.sampling.builtin.batch import BatchPlan, DecodeBatch
from tinsmith_trainer.sampling.builtin.batches import Batches, OutOfMemoryForNow, WaitingJobs
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.intake import Intake, Orders, Submission
from tinsmith_trainer.sampling.builtin.jobs import Run, Sample, empty_sequence, not_finite, start_run
from tinsmith_trainer.sampling.builtin.prefill import Prefill
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings
from tinsmith_trainer.torch_model.device_faults import end_if_device_is_lost
from tinsmith_trainer.torch_model.loading import TorchModel

log = structlog.get_logger(__name__)


class SamplingLoop:
    """All state belongs to the sampler's thread; others speak through the intake, or read counters."""

    def __init__(self, torch_model: TorchModel, settings: BuiltinSamplerSettings, intake: Intake) -> None:
        self._torch_model = torch_model
        self._settings = settings
        self._intake = intake
        self._forward = ForwardPass(torch_model)
        self._plan = BatchPlan(self._forward.geometry, settings, torch_model.info.max_sequence_length)
        self._serials = itertools.count()
        self._live: dict[int, Run] = {}
        self._answered = 0
        self._dropped_adapters: set[int] = set()
        self._sampled_tokens = self._prefilled_tokens = self._prefix_hit_tokens = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self._prefixes = PrefixCache(self._settings.prefix_cache_bytes)
        self._batches = Batches(self._plan, self._forward)
        self._waiting = WaitingJobs()
        self._prefill: Prefill | None = None

    def run(self) -> None:
        """Until the intake is closed."""
        closing = False
        while not closing:
            orders = self._intake.take(wait=not self._live)
            closing = orders.closing
            try:
                self._obey(orders)
                self._round()
            except Exception as error:  # a fault of ours must not end the thread with jobs in it
                log.exception("sampler_round_failed")
                self._fail(list(self._live.values()), _as_trainer_error(error))
                self._start_empty()

    def stats(self) -> SamplerStats:
        active = max(0, len(self._live) - len(self._waiting))
        return SamplerStats(
            active=active,
            # Not by adding up places: while it is read, a job may be on its way from one to the next.
            waiting=max(0, self._intake.submitted() - self._answered - active),
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._prefilled_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            busy_seconds=self._forward.busy_seconds,
        )

    def _obey(self, orders: Orders) -> None:
        for submission in orders.submissions:
            self._accept(submission)
        for adapter in orders.dropped:
            self._dropped_adapters.add(adapter.serial)
        if orders.closing:
            error = SamplerClosed("The sampler was closed before the request was done; send it again.")
            self._fail(list(self._live.values()), error)
        elif orders.cancelled:
            cancelled = [run for run in self._live.values() if run.job.request_id in orders.cancelled]
            self._fail(cancelled, UserError("The request was cancelled."))
        self._forget_dropped_adapters()

    def _accept(self, submission: Submission) -> None:
        try:
            run = start_run(submission, next(self._serials), self._torch_model)
        except TrainerError as error:
            self._answer(submission.done, SampleOutcome(error=error))
            return
        self._live[run.serial] = run
        if run.max_tokens == 0 and run.first_scored is None:
            self._complete_empty(run)
        else:
            self._waiting.add(self._plan.key(len(run.job.prompt) - 1, run.adapter), run)

    def _round(self) -> None:
        self._prefill_some()
        for batch in self._batches.active:
            self._step(batch)

    def _prefill_some(self) -> None:
        """Fills rows from the queue until they are full or this round's prompt tokens are spent."""
        budget = self._settings.prefill_tokens_per_step
        try:
            while budget > 0:
                self._batches.fill()
                self._prefill = self._prefill or self._next_prefill()
                if self._prefill is None:
                    return
                budget -= self._advance(self._prefill)
            self._batches.fill()
        except OutOfMemoryForNow:
            return  # rows that run now will end; until then nothing starts, or the waiting one never would

    def _next_prefill(self) -> Prefill | None:
        run = self._waiting.next(self._batches.has_free_row)
        if run is None:
            return None
        try:
            prefill = Prefill(run, self._forward, self._prefixes, self._settings.prefill_block_tokens)
        except Exception as error:  # no memory for the prompt, say
            self._fail([run], _as_trainer_error(error))
            return None
        self._prefix_hit_tokens += run.hit_tokens
        return prefill

    def _advance(self, prefill: Prefill) -> int:
        """Computes a block if there is one left; returns its tokens."""
        tokens = 0
        try:
            if not prefill.finished:
                tokens = prefill.run_block()
        except Exception as error:
            self._fail([prefill.run], _as_trainer_error(error))
            return 0
        self._prefilled_tokens += tokens
        if prefill.finished:
            self._prefill = None
            self._start_samples(prefill)
        return tokens

    def _start_samples(self, prefill: Prefill) -> None:
        run = prefill.run
        if run.max_tokens == 0:
            self._complete_empty(run)
            return
        for index in range(run.job.num_samples):
            watch = run.stop_rule.watch(self._torch_model.tokenizer)
            token, position = int(run.job.prompt[-1]), len(run.job.prompt) - 1
            self._batches.enqueue(Sample(run, index, token, position, prefill.kv, watch))

    def _step(self, batch: DecodeBatch) -> None:
        try:
            result = batch.step()
        except Exception as error:
            log.exception("decode_step_failed")
            self._batches.discard(batch)
            self._fail([sample.run for sample in batch.samples], _as_trainer_error(error))
            return
        self._sampled_tokens += result.drawn_tokens
        for sample in result.outgrown:
            self._batches.enqueue(sample)
        for sample in result.diverged:
            self._fail([sample.run], not_finite(sample.run))
        for sample, sequence in result.ended:
            if sample.run.complete(sample.index, sequence):
                self._end(sample.run, sample.run.outcome())

    def _complete_empty(self, run: Run) -> None:
        for index in range(run.job.num_samples):
            run.complete(index, empty_sequence(run.job))
        self._end(run, run.outcome())

    def _fail(self, runs: list[Run], error: TrainerError) -> None:
        if not runs:
            return
        for run in runs:
            self._end(run, SampleOutcome(error=error))
        if self._prefill is not None and self._prefill.run.finished:
            self._prefill = None
        self._waiting.remove_finished()
        self._batches.remove_finished()

    def _end(self, run: Run, outcome: SampleOutcome) -> None:
        if run.finished:
            return
        run.finished = True
        del self._live[run.serial]
        self._answer(run.done, outcome)
        if run.adapter.serial in self._dropped_adapters:
            self._forget_dropped_adapters()

    def _forget_dropped_adapters(self) -> None:
        """Drops cached prefixes of dropped adapters that no job uses any more."""
        if self._dropped_adapters:
            in_use = {run.adapter.serial for run in self._live.values()}
            for serial in self._dropped_adapters - in_use:
                self._prefixes.forget(serial)
            self._dropped_adapters &= in_use

    def _answer(self, done: Callable[[SampleOutcome], None], outcome: SampleOutcome) -> None:
        self._answered += 1
        try:
            done(outcome)
        except Exception:  # the caller's fault must not end the sampler's thread
            log.exception("sample_callback_failed")


def _as_trainer_error(error: Exception) -> TrainerError:
    if isinstance(error, TrainerError):
        return error
    end_if_device_is_lost(error)
    return ServerError(f"Sampling failed inside the worker: {type(error).__name__}: {error}")
