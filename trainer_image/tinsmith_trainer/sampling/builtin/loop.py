"""The sampler's thread: continuous batching.

Each round takes new commands, and does one piece of work for the tenant that has the turn. A piece of work is the
computation of a prompt block, or the draw of a token for each of the tenant's samples in a batch. Samples of other
tenants are included if a shared step is not slower than separate turns. A tenant's jobs start in order. A job is
skipped only while the batch of the job is full.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from torch import Tensor

from tinsmith_trainer.errors import SamplerClosed, ServerError, TrainerError, UserError
from tinsmith_trainer.sampling.base import SampleOutcome, SamplerStats
from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan
from tinsmith_trainer.sampling.builtin.batches import Batches, OutOfMemoryForNow
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.intake import Commands, Intake, Submission
from tinsmith_trainer.sampling.builtin.jobs import Run, Sample, empty_sequence, start_run
from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix
from tinsmith_trainer.sampling.builtin.model_cache.choice import AnyBatch, AnyPrefill, SamplerForward, open_prompt
from tinsmith_trainer.sampling.builtin.model_cache.forward import CacheForward
from tinsmith_trainer.sampling.builtin.model_cache.prompts import CachePrefill
from tinsmith_trainer.sampling.builtin.model_cache.states import SequenceStates
from tinsmith_trainer.sampling.builtin.prefill import Prefill, PromptGroup, SeenPrefill
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache, SharedPrefixes
from tinsmith_trainer.sampling.builtin.rules.logit_changes import LogitChanges
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings
from tinsmith_trainer.sampling.tenant_shares import FairQueue
from tinsmith_trainer.torch_model.device import end_if_device_is_lost
from tinsmith_trainer.torch_model.loading import TorchModel

log = structlog.get_logger(__name__)

SHORT_PROMPT_PART, OPEN_PROMPTS_PART = 64, 4
"""The additional memory for prompts in computation, as a fraction of the memory for keys and values."""
CREDIT_STEPS = 16
"""The number of steps in the credit of a returning tenant.

The credit is the cost of a prompt block and of this many steps of one row.
"""


class JobFailed(Exception):
    """An error for a failed job, after the job's own error was reported."""


class SamplingLoop:
    """The loop.

    The state of the loop belongs to the sampler's thread. Other threads use the intake, or read counters.
    """

    def __init__(
        self, torch_model: TorchModel, forward: SamplerForward, settings: BuiltinSamplerSettings, intake: Intake
    ) -> None:
        self._torch_model = torch_model
        self._settings = settings
        self._intake = intake
        self._forward = forward
        self._shares_prompts = (
            not settings.deterministic and isinstance(forward, ForwardPass) and forward.shares_prefixes()
        )
        context = torch_model.info.max_sequence_length
        self._plan = BatchPlan(self._forward.geometry, settings, min(context, settings.longest_row_tokens or context))
        self._serials = itertools.count()
        self._live: dict[int, Run] = {}
        self._answered = 0
        self._step_began_at: float | None = None
        self._dropped_adapters: set[int] = set()
        self._sampled_tokens = self._prefilled_tokens = self._prefix_hit_tokens = 0
        self._start_empty()

    def _start_empty(self) -> None:
        cost = self._forward.cost
        credit = cost.of(self._settings.prefill_block_tokens) + CREDIT_STEPS * cost.of(1)
        self._fair_queue = FairQueue(credit)
        self._lanes: dict[str, Lane] = {}
        self._first_keys: dict[int, BatchKey] = {}
        self._jobs: Counter[str] = Counter()
        self._prefixes: PrefixCache[Any] = PrefixCache(self._settings.prefix_cache_bytes)
        self._shared = SharedPrefixes()
        self._batches = Batches(self._plan, self._forward, self._fair_queue, self._shared)

    def run(self) -> None:
        """Run until the intake is closed."""
        closing = False
        while not closing:
            commands = self._intake.take(wait=not self._live)
            closing = commands.closing
            self._step_began_at = time.monotonic()
            try:
                self._apply(commands)
                if self._live:
                    self._advance()
            except Exception as error:  # an internal error must not end the thread with jobs in it
                log.exception("sampler_round_failed")
                self._fail(list(self._live.values()), _as_trainer_error(error))
                self._start_empty()
            self._step_began_at = None

    def stats(self) -> SamplerStats:
        waiting = sum(len(lane.waiting) for lane in list(self._lanes.values()))
        active = max(0, len(self._live) - waiting)
        began_at = self._step_began_at
        return SamplerStats(
            active=active,
            # The lengths of the queues are not added up, because a job may move between queues while they are read.
            waiting=max(0, self._intake.submitted() - self._answered - active),
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._prefilled_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            busy_seconds=self._forward.busy_seconds,
            step_seconds=0.0 if began_at is None else time.monotonic() - began_at,
        )

    def _apply(self, commands: Commands) -> None:
        for submission in commands.submissions:
            self._accept(submission)
        for adapter in commands.dropped:
            self._dropped_adapters.add(adapter.serial)
        if commands.closing:
            error = SamplerClosed("The sampler was closed before the request was done; send it again.")
            self._fail(list(self._live.values()), error)
        elif commands.cancelled:
            cancelled = [run for run in self._live.values() if run.job.request_id in commands.cancelled]
            self._fail(cancelled, UserError("The request was cancelled."))
        self._forget_dropped_adapters()

    def _accept(self, submission: Submission) -> None:
        try:
            run = start_run(submission, next(self._serials), self._torch_model, self._plan.max_sequence_length)
        except TrainerError as error:
            self._answer(submission.done, SampleOutcome(error=error))
            return
        tenant = run.job.tenant
        self._live[run.serial] = run
        self._shared.enter(run)
        self._jobs[tenant] += 1
        self._fair_queue.enter(tenant)
        lane = self._lanes.setdefault(tenant, Lane(tenant))
        if run.max_tokens == 0 and run.first_scored is None:
            self._complete_empty(run)
        else:
            self._wait(lane, run, shared=self._shares(run))

    def _wait(self, lane: Lane, run: Run, *, shared: bool) -> None:
        self._first_keys[run.serial] = key = self._first_key(run, shared=shared)
        lane.waiting.add(key, run)

    def _advance(self) -> None:
        """Do the smallest piece of work in a tenant's turn: a prompt block or a step."""
        self._batches.fill()
        for tenant in self._fair_queue.order():
            if self._step_tenant(self._lanes[tenant]):
                return
        raise AssertionError("no sample can continue, and none waits for one that will end")

    def _step_tenant(self, lane: Lane) -> bool:
        """Do one piece of work of the tenant.

        Return False if all jobs of the tenant wait for rows or memory of other tenants.
        """
        open_batches = self._batches.of(lane.tenant)
        # The other batches of this pass may have been closed for a tenant that needed the memory.
        lane.to_step = [batch for batch in lane.to_step if batch in open_batches]
        if not lane.to_step:
            if lane.prompt_tokens < self._settings.prefill_tokens_per_step and self._compute_prompt(lane):
                return True
            lane.prompt_tokens, lane.to_step = 0, self._batches.of(lane.tenant)
        if lane.to_step:
            self._step_batch(lane.to_step.pop(0), lane.tenant)
            return True
        return self._compute_prompt(lane)

    def _compute_prompt(self, lane: Lane) -> bool:
        """Compute a block of the open prompt, or of the next prompt. Return False if no prompt can be computed."""
        try:
            self._open_prompts(lane)
        except OutOfMemoryForNow:
            if not lane.prefills:
                return False
        except JobFailed:
            return True
        if not lane.prefills:
            return False
        first = lane.prefills[0]
        if self._settings.deterministic or first.goes_alone:
            self._compute_block(lane, first)
        else:
            self._compute_group(lane)
        return True

    def _open_prompts(self, lane: Lane) -> None:
        """Open one prompt, or several prompts that one forward can compute together."""
        if not lane.prefills and (prefill := self._next_prefill(lane)) is not None:
            lane.prefills.append(prefill)
        if self._settings.deterministic or isinstance(self._forward, CacheForward):
            return
        tokens = sum(prefill.left for prefill in lane.prefills)
        while lane.prefills and tokens < self._forward_tokens and (prefill := self._next_prefill(lane)) is not None:
            lane.prefills.append(prefill)
            tokens += prefill.left

    @property
    def _forward_tokens(self) -> int:
        settings = self._settings
        return max(
            settings.prefill_block_tokens, min(settings.prefill_forward_tokens, settings.prefill_tokens_per_step)
        )

    def _next_prefill(self, lane: Lane) -> AnyPrefill | None:
        promised: Counter[BatchKey] = Counter()
        for prefill in lane.prefills:
            promised[self._first_keys[prefill.run.serial]] += prefill.run.job.num_samples
        run = lane.waiting.first(lambda key: self._batches.may_start(key, lane.tenant, promised[key]))
        if run is not None and self._lacks_room_to_share(run):
            lane.waiting.remove(self._first_keys[run.serial])
            self._wait(lane, run, shared=False)
            return self._next_prefill(lane)
        if run is None or not self._has_room_for_prompt(run):
            return None
        lane.waiting.remove(self._first_keys[run.serial])
        try:
            prefill = self._prefill(run)
        except Exception as error:  # for example, no memory for the prompt
            self._fail([run], _as_trainer_error(error))
            raise JobFailed from error
        return prefill

    def _prefill(self, run: Run) -> AnyPrefill:
        run.started_at = time.time()
        vision, forward = self._torch_model.vision, self._forward
        if not run.job.images or vision is None:
            return open_prompt(run, forward, self._prefixes, self._plan, self._known(run))
        if isinstance(forward, ForwardPass):
            return SeenPrefill(run, forward, self._prefixes, self._plan, vision)
        raise UserError(
            f"The prompt has images, and this server samples {self._torch_model.info.architecture} from text alone."
        )

    def _first_key(self, run: Run, *, shared: bool) -> BatchKey:
        """Return the key of the first batch for the job's samples."""
        return self._plan.key(0 if shared else len(run.job.prompt) - 1, run.adapter)

    def _shares(self, run: Run) -> bool:
        return self._shares_prompts and self._shared.shares(run)

    def _known(self, run: Run) -> SharedPrefix | None:
        """Return the shared part of the prompt, if this part is known and the prompt needs no scores."""
        return self._shared.known(run) if run.first_scored is None else None

    def _lacks_room_to_share(self, run: Run) -> bool:
        """Return whether a job must stop waiting for a shared prompt, and take a row for all tokens.

        Shared prompts are not evicted. Without a row, the job would wait until the samples of other jobs end.
        """
        if self._first_keys[run.serial] == self._first_key(run, shared=False) or self._known(run) is not None:
            return False
        return not self._batches.has_room_for_shared(self._forward.geometry.row_bytes(len(run.job.prompt)))

    def _has_room_for_prompt(self, run: Run) -> bool:
        """Return whether the prompt may open.

        Each tenant may have one open prompt. Turns of other tenants may come between two blocks of a prompt. Short
        prompts always open.
        """
        if self._known(run) is not None:
            return True
        needed = self._forward.geometry.row_bytes(len(run.job.prompt))
        taken = sum(prefill.nbytes for lane in self._lanes.values() for prefill in lane.prefills)
        memory = self._settings.kv_cache_bytes
        return needed <= memory // SHORT_PROMPT_PART or not taken or taken + needed <= memory // OPEN_PROMPTS_PART

    def _compute_block(self, lane: Lane, prefill: AnyPrefill) -> None:
        try:
            if not prefill.finished:
                self._fair_queue.charge(lane.tenant, prefill.block_cost())
                tokens = prefill.run_block()
                lane.prompt_tokens += tokens
                self._prefilled_tokens += tokens
        except Exception as error:
            self._fail([prefill.run], _as_trainer_error(error))
            return
        self._start_finished(lane)

    def _compute_group(self, lane: Lane) -> None:
        forward = self._forward
        assert isinstance(forward, ForwardPass)
        prefills = [prefill for prefill in lane.prefills if isinstance(prefill, Prefill)]
        for prefill in prefills:
            prefill.take_known()
        unscored = [one for one in prefills if not (one.finished or one.goes_alone)]
        group = None
        try:
            if unscored:
                group = PromptGroup(unscored, self._forward_tokens)
                self._fair_queue.charge(lane.tenant, group.cost(forward))
                group.compute(forward, self._plan)
                lane.prompt_tokens += group.tokens
                self._prefilled_tokens += group.tokens
        except Exception as error:
            self._fail([prefill.run for prefill in (group.prefills if group else unscored)], _as_trainer_error(error))
            return
        self._start_finished(lane)

    def _start_finished(self, lane: Lane) -> None:
        finished = [prefill for prefill in lane.prefills if prefill.finished]
        lane.prefills = [prefill for prefill in lane.prefills if not prefill.finished]
        for prefill in finished:
            self._prefix_hit_tokens += prefill.run.hit_tokens
            self._start_samples(prefill)

    def _begun(self, prefill: AnyPrefill) -> tuple[Tensor | SequenceStates | None, SharedPrefix | None]:
        """Return the keys and values with which each sample of a prompt begins, and the samples' shared prefix."""
        if isinstance(prefill, CachePrefill):
            return prefill.kv, None
        shared = prefill.shared
        if shared is None and self._shares(prefill.run):
            shared = self._shared.known(prefill.run)
            # Since this prompt was opened, other jobs may have submitted the same prompt, or opened batches.
            if shared is None and self._batches.has_room_for_shared(prefill.nbytes):
                shared = self._shared.keep(prefill.run, prefill.kv)
        return (prefill.kv if shared is None else prefill.kv[..., :0, :]), shared

    def _start_samples(self, prefill: AnyPrefill) -> None:
        run = prefill.run
        if run.max_tokens == 0:
            self._complete_empty(run)
            return
        kv, shared = self._begun(prefill)
        for index in range(run.job.num_samples):
            watch = run.stop_rule.watch(self._torch_model.tokenizer, run.job.prompt)
            token, position = int(run.job.prompt[-1]), len(run.job.prompt) - 1
            changes = LogitChanges(run.job) if run.job.params.changes_logits else None
            self._batches.enqueue(Sample(run, index, token, position, kv, shared, watch, changes))

    def _step_batch(self, batch: AnyBatch, tenant: str) -> None:
        try:
            result = batch.step(self._batches.co_batched(batch, tenant))
        except Exception as error:
            log.exception("decode_step_failed")
            self._batches.discard(batch)
            self._fail([sample.run for sample in batch.samples], _as_trainer_error(error))
            return
        self._sampled_tokens += result.drawn_tokens
        for sample in result.outgrown:
            self._batches.enqueue(sample)
        for sample, reason in result.failed:
            self._fail([sample.run], reason)
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
        for lane in self._lanes.values():
            lane.remove_finished()
        self._batches.remove_finished()

    def _end(self, run: Run, outcome: SampleOutcome) -> None:
        if run.finished:
            return
        run.finished = True
        del self._live[run.serial]
        self._shared.leave(run)
        self._first_keys.pop(run.serial, None)
        self._leave(run.job.tenant)
        self._answer(run.done, outcome)
        if run.adapter.serial in self._dropped_adapters:
            self._forget_dropped_adapters()

    def _leave(self, tenant: str) -> None:
        """Count the end of a job. A tenant without jobs gets no more turns."""
        self._jobs[tenant] -= 1
        if not self._jobs[tenant]:
            del self._jobs[tenant], self._lanes[tenant]
            self._fair_queue.leave(tenant)

    def _forget_dropped_adapters(self) -> None:
        """Drop cached prefixes of dropped adapters that no job uses."""
        if self._dropped_adapters:
            in_use = {run.adapter.serial for run in self._live.values()}
            for serial in self._dropped_adapters - in_use:
                self._prefixes.forget(serial)
            self._dropped_adapters &= in_use

    def _answer(self, done: Callable[[SampleOutcome], None], outcome: SampleOutcome) -> None:
        self._answered += 1
        try:
            done(outcome)
        except Exception:  # an error in the caller's function must not end the sampler's thread
            log.exception("sample_callback_failed")


def _as_trainer_error(error: Exception) -> TrainerError:
    if isinstance(error, TrainerError):
        return error
    end_if_device_is_lost(error)
    return ServerError(f"Sampling failed inside the worker: {type(error).__name__}: {error}")


class WaitingJobs:
    """The waiting jobs, in one queue for each batch key. A full batch delays only the jobs that need this batch."""

    def __init__(self) -> None:
        self._queues: dict[BatchKey, deque[Run]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, key: BatchKey, run: Run) -> None:
        """Add a job after the older jobs of the same key.

        If a job waited under another key before, it may be older than jobs of this key.
        """
        bisect.insort(self._queues.setdefault(key, deque()), run, key=lambda run: run.serial)
        self._length += 1

    def first(self, may_start: Callable[[BatchKey], bool]) -> Run | None:
        """Return the oldest job that can get a row in a batch."""
        for key in sorted(self._queues, key=lambda key: self._queues[key][0].serial):
            if may_start(key):
                return self._queues[key][0]
        return None

    def remove(self, key: BatchKey) -> None:
        """Remove the first job of a key."""
        self._queues[key].popleft()
        self._length -= 1
        if not self._queues[key]:
            del self._queues[key]

    def remove_finished(self) -> None:
        """Remove jobs that ended while they were waiting."""
        left = {key: deque(run for run in queue if not run.finished) for key, queue in self._queues.items()}
        self._queues = {key: queue for key, queue in left.items() if queue}
        self._length = sum(len(queue) for queue in self._queues.values())


@dataclass(slots=True)
class Lane:
    """A tenant's work in the sampler.

    In a pass, a tenant computes some prompt tokens, and then one step in each batch with rows of the tenant.

    `prompt_tokens` counts the prompt tokens that were computed since the last step. `to_step` holds the batches in
    which this pass has not computed a step yet.
    """

    tenant: str
    waiting: WaitingJobs = field(default_factory=WaitingJobs)
    prefills: list[AnyPrefill] = field(default_factory=list)
    prompt_tokens: int = 0
    to_step: list[AnyBatch] = field(default_factory=list)

    def remove_finished(self) -> None:
        """Remove jobs that ended early."""
        self.waiting.remove_finished()
        self.prefills = [prefill for prefill in self.prefills if not prefill.run.finished]
