"""A job on its way through the sampler, and the sequences it is drawing."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.errors import TrainerError, UserError
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, SamplingParams, Sequence
from tinsmith_trainer.sampling.builtin.adapters import LoadedAdapter
from tinsmith_trainer.sampling.builtin.draws import Draw, uniform
from tinsmith_trainer.sampling.builtin.intake import Submission
from tinsmith_trainer.sampling.builtin.stops import StopRule, StopWatch
from tinsmith_trainer.torch_model.loading import TorchModel


@dataclass(slots=True, eq=False)
class Run:
    """A submitted job. `done` is called by `finish`, once."""

    job: SampleJob
    adapter: LoadedAdapter
    done: Callable[[SampleOutcome], None]
    serial: int
    stop_rule: StopRule
    max_tokens: int
    seed: int = 0
    finished: bool = False
    hit_tokens: int = 0
    prompt_logprobs: NDArray[np.float32] | None = None
    sequences: list[Sequence | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = self.job.params.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self.sequences = [None] * self.job.num_samples
        if self.job.prompt_logprobs:
            self.prompt_logprobs = np.full(len(self.job.prompt), np.nan, np.float32)

    @property
    def prefix(self) -> NDArray[np.int32]:
        """The part of the prompt that prefill computes; the last token is the first that decoding feeds."""
        return self.job.prompt[:-1]

    @property
    def first_scored(self) -> int | None:
        """The first prompt position that has a logprob to compute, or None."""
        if not self.job.prompt_logprobs:
            return None
        length, last_n = len(self.job.prompt), self.job.prompt_logprobs_last_n
        first = 1 if last_n is None else max(1, length - last_n)
        return first if first < length else None

    def complete(self, index: int, sequence: Sequence) -> bool:
        """Keeps a finished sequence; true if it was the job's last."""
        self.sequences[index] = sequence
        return all(sequence is not None for sequence in self.sequences)

    def outcome(self) -> SampleOutcome:
        return SampleOutcome(
            sequences=tuple(sequence for sequence in self.sequences if sequence is not None),
            prompt_logprobs=self.prompt_logprobs,
            prompt_cache_hit_tokens=self.hit_tokens,
        )


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence being drawn. `next_token` is fed at `position`; the draw there is token `len(tokens)`.

    `kv` holds keys and values of all positions before, while the sample is not in a batch.
    """

    run: Run
    index: int
    next_token: int
    position: int
    kv: Tensor | None
    watch: StopWatch
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def draw(self) -> Draw:
        """How this row draws its next token."""
        params = self.run.job.params
        number = uniform(self.run.seed, self.index, len(self.tokens)) if params.temperature > 0 else 0.0
        return Draw(params.temperature, params.top_k, params.top_p, number)

    def push(self, token: int, logprob: float) -> Sequence | None:
        """Takes a drawn token; the finished sequence if it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stopped = self.watch.sees_end(token)
        if stopped or len(self.tokens) >= self.run.max_tokens:
            return finished_sequence(self.tokens, self.logprobs, stopped)
        self.next_token = token
        self.position += 1
        return None


def start_run(submission: Submission, serial: int, torch_model: TorchModel) -> Run:
    """Checks a job. Raises UserError, with one sentence that says why it cannot run."""
    job, adapter = submission.job, submission.adapter
    if adapter is None:
        raise UserError(f"Adapter {job.adapter_key} is not loaded; it was dropped or never saved for sampling.")
    max_tokens = room_for_tokens(job, torch_model.info)
    stop_rule = StopRule.of(job.params, torch_model.eos_token_ids)
    return Run(job, adapter, submission.done, serial, stop_rule, max_tokens)


def empty_sequence() -> Sequence:
    return finished_sequence([], [], stopped=False)


def finished_sequence(tokens: list[int], logprobs: list[float], stopped: bool) -> Sequence:
    return Sequence(np.array(tokens, np.int32), np.array(logprobs, np.float32), stopped)


def room_for_tokens(job: SampleJob, info: BaseModelInfo) -> int:
    """How many tokens each sequence may have: `max_tokens`, cut to what the context leaves.

    Raises UserError for a job that cannot run, with one sentence that says why.
    """
    _check_prompt(job, info)
    _check_params(job.params)
    if job.num_samples < 1:
        raise UserError(f"num_samples is {job.num_samples}; it must be at least 1.")
    if job.prompt_logprobs_last_n is not None and job.prompt_logprobs_last_n < 0:
        raise UserError(f"prompt_logprobs_last_n is {job.prompt_logprobs_last_n}; it must not be negative.")
    room = info.max_sequence_length - len(job.prompt)
    if room < 1:
        raise UserError(
            f"The prompt has {len(job.prompt)} tokens and leaves no room to sample: "
            f"the model's context is {info.max_sequence_length} tokens. Shorten the prompt."
        )
    return room if job.params.max_tokens is None else min(job.params.max_tokens, room)


def _check_prompt(job: SampleJob, info: BaseModelInfo) -> None:
    if len(job.prompt) == 0:
        raise UserError("The prompt is empty; sampling needs at least one token to start from.")
    outside = job.prompt[(job.prompt < 0) | (job.prompt >= info.vocab_size)]
    if len(outside):
        raise UserError(f"The prompt has token {outside[0]}; the model's vocabulary is 0 to {info.vocab_size - 1}.")


def _check_params(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise UserError(f"temperature is {params.temperature}; it must be 0 (greedy) or a positive number.")
    if params.top_k == 0 or params.top_k < -1:
        raise UserError(f"top_k is {params.top_k}; it must be at least 1, or -1 for all tokens.")
    if not 0 < params.top_p <= 1:
        raise UserError(f"top_p is {params.top_p}; it must be above 0 and at most 1.")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise UserError(f"max_tokens is {params.max_tokens}; it must not be negative.")
    if any(not string for string in params.stop_strings or ()):
        raise UserError("A stop string is empty; it would stop every sequence at once. Leave it out.")


def not_finite(run: Run) -> TrainerError:
    """The error for a row whose logits are NaN or infinite."""
    who = f"adapter {run.adapter.key}" if run.adapter.key else "the base model"
    return UserError(
        f"The logits of {who} are not finite, so nothing can be sampled from it: its weights have diverged."
    )
