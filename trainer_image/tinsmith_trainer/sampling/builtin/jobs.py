"""A job on its way through the sampler, and the sequences it is drawing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.errors import TrainerError, UserError
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sequence
from tinsmith_trainer.sampling.builtin.adapters import LoadedAdapter
from tinsmith_trainer.sampling.builtin.checks import room_for_tokens
from tinsmith_trainer.sampling.builtin.draws import Draw, uniform
from tinsmith_trainer.sampling.builtin.intake import Submission
from tinsmith_trainer.sampling.builtin.stops import StopRule, StopWatch
from tinsmith_trainer.torch_model.loading import TorchModel


@dataclass(slots=True, eq=False)
class Run:
    """A submitted job. `finished` once `done` was called."""

    job: SampleJob
    adapter: LoadedAdapter
    done: Callable[[SampleOutcome], None]
    serial: int
    stop_rule: StopRule
    max_tokens: int
    seed: int = field(init=False)
    finished: bool = field(init=False, default=False)
    hit_tokens: int = field(init=False, default=0)
    prompt_logprobs: NDArray[np.float32] | None = field(init=False, default=None)
    sequences: dict[int, Sequence] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        seed = self.job.params.seed
        self.seed = secrets.randbits(63) if seed is None else seed
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
        return len(self.sequences) == self.job.num_samples

    def outcome(self) -> SampleOutcome:
        return SampleOutcome(
            sequences=tuple(self.sequences[index] for index in range(self.job.num_samples)),
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


def not_finite(run: Run) -> TrainerError:
    """The error for a row whose logits are NaN or infinite."""
    who = f"adapter {run.adapter.key}" if run.adapter.key else "the base model"
    return UserError(
        f"The logits of {who} are not finite, so nothing can be sampled from it: its weights have diverged."
    )
