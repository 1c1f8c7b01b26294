"""A job in the sampler, and the sequences of the job."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.errors import ServerError, TrainerError, UserError
from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, SampleOutcome, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.builtin.adapters import LoadedAdapter
from tinsmith_trainer.sampling.builtin.draws import Draw, uniform
from tinsmith_trainer.sampling.builtin.intake import Submission
from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix
from tinsmith_trainer.sampling.builtin.model_cache.states import SequenceStates
from tinsmith_trainer.sampling.builtin.prompt_scores import PromptScores, first_scored
from tinsmith_trainer.sampling.builtin.rules.logit_changes import LogitChanges
from tinsmith_trainer.sampling.checks import room_for_tokens
from tinsmith_trainer.sampling.stops import StopRule, StopWatch
from tinsmith_trainer.torch_model.loading import TorchModel


@dataclass(slots=True, eq=False)
class Run:
    """A submitted job. `finished` is set after `done` was called."""

    job: SampleJob
    adapter: LoadedAdapter
    done: Callable[[SampleOutcome], None]
    serial: int
    stop_rule: StopRule
    max_tokens: int
    seed: int = field(init=False)
    finished: bool = field(init=False, default=False)
    hit_tokens: int = field(init=False, default=0)
    started_at: float = field(init=False, default=0.0)
    angle_shift: int = field(init=False, default=0)
    """The difference between rotary positions and token positions after the prompt.

    For some models, an image takes fewer rotary positions than tokens.
    """
    first_scored: int | None = field(init=False)
    sequences: dict[int, Sequence] = field(init=False, default_factory=dict)
    _scores: PromptScores | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        seed = self.job.params.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self.first_scored = first_scored(self.job)

    @property
    def prefix(self) -> NDArray[np.int32]:
        """The tokens of the prompt that prefill computes. Decoding computes the prompt's last token."""
        return self.job.prompt[:-1]

    @property
    def scores(self) -> PromptScores:
        """The scores of the prompt.

        The scores are created on first use, so that waiting jobs take no memory for scores.
        """
        if self._scores is None:
            self._scores = PromptScores(self.job, self.seed)
        return self._scores

    def complete(self, index: int, sequence: Sequence) -> bool:
        """Add a finished sequence to the job. Return whether the sequence was the last sequence of the job."""
        self.sequences[index] = sequence
        return len(self.sequences) == self.job.num_samples

    def outcome(self) -> SampleOutcome:
        return SampleOutcome(
            sequences=tuple(self.sequences[index] for index in range(self.job.num_samples)),
            prompt_logprobs=self.scores.logprobs,
            prompt_cache_hit_tokens=self.hit_tokens,
            topk_prompt_logprobs=self.scores.topk,
            target_prompt_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.alternatives,
            prompt_tokens=len(self.job.prompt),
            started_at=self.started_at,
        )


@dataclass(slots=True, eq=False)
class Sample:
    """A sequence that is being drawn.

    With `next_token` at `position` as input, the model computes token number `len(tokens)`.

    `kv` holds the keys and values of all earlier positions while the sample is not in a batch. If the sample has no
    earlier positions, `kv` is None. `prefix` holds the part that the sample shares with other samples. `kv` does not
    include the shared part. `changes` are the changes of the logits before each draw, or None if the job asks for none.
    """

    run: Run
    index: int
    next_token: int
    position: int
    kv: Tensor | SequenceStates | None
    prefix: SharedPrefix | None
    watch: StopWatch
    changes: LogitChanges | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopkLogprobs] = field(default_factory=list)

    @property
    def own_position(self) -> int:
        """The position counted from the end of the shared prefix."""
        return self.position - (self.prefix.tokens if self.prefix else 0)

    def draw(self, ahead: int = 0) -> Draw:
        """Return the parameters for the draw of the next token, or of a token that comes `ahead` tokens later."""
        params = self.run.job.params
        number = uniform(self.run.seed, self.index, len(self.tokens) + ahead) if params.temperature > 0 else 0.0
        return Draw(params.temperature, params.top_k, params.top_p, number)

    def push(self, drawn: DrawnToken) -> Sequence | None:
        """Append a drawn token. Return the sequence if the token finishes it, otherwise None."""
        if self.run.job.drawn is not None:
            self.run.job.drawn(self.index, drawn)
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if drawn.top_logprobs is not None:
            self.top_logprobs.append(drawn.top_logprobs)
        stopped = self.watch.sees_end(drawn.token)
        if self.changes is not None:
            stopped |= self.changes.take(drawn.token)
        if stopped or len(self.tokens) >= self.run.max_tokens:
            return finished_sequence(self.run.job, self.tokens, self.logprobs, self.top_logprobs, stopped)
        self.next_token = drawn.token
        self.position += 1
        return None


def start_run(submission: Submission, serial: int, torch_model: TorchModel, longest: int) -> Run:
    """Check a job, and return a run of the job. A prompt and a sequence together may have at most `longest` tokens.

    Raises UserError with the reason.
    """
    job, adapter = submission.job, submission.adapter
    if adapter is None:
        raise UserError(f"Adapter {job.adapter_key} is not loaded; it was dropped or never saved for sampling.")
    if job.params.constraint is not None and job.grammar is None:
        raise ServerError("The constraint of this job was not compiled; pass the job through `prepared` first.")
    if job.images:
        job = _with_placed_images(job, torch_model)
    max_tokens = room_for_tokens(job, torch_model.info, longest)
    stop_rule = StopRule.of(job.params, torch_model.eos_token_ids)
    return Run(job, adapter, submission.done, serial, stop_rule, max_tokens)


def _with_placed_images(job: SampleJob, torch_model: TorchModel) -> SampleJob:
    if torch_model.vision is None:
        raise UserError(f"The prompt has images, and {torch_model.info.path} takes text alone on this server.")
    if job.images[-1].before_token >= len(job.prompt):
        raise UserError("The prompt ends with an image; a sample begins behind a token of text. Put one behind it.")
    return replace(job, prompt=torch_model.vision.placed("The prompt", job.prompt, job.images))


def empty_sequence(job: SampleJob) -> Sequence:
    return finished_sequence(job, [], [], [], stopped=False)


def finished_sequence(
    job: SampleJob, tokens: list[int], logprobs: list[float], top_logprobs: list[TopkLogprobs], stopped: bool
) -> Sequence:
    k = job.topk_sample_logprobs
    return Sequence(
        np.array(tokens, np.int32), np.array(logprobs, np.float32), stopped, _joined(k, top_logprobs) if k else None
    )


def _joined(k: int, parts: list[TopkLogprobs]) -> TopkLogprobs:
    parts = [TopkLogprobs.empty(0, k), *parts]
    return TopkLogprobs(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )


def not_finite(run: Run) -> TrainerError:
    """Return the error for a sample with logits that are NaN or infinite."""
    weights = f"adapter {run.adapter.key}" if run.adapter.key else "the base model"
    return UserError(
        f"The logits of {weights} are not finite, so nothing can be sampled from it: its weights have diverged."
    )
