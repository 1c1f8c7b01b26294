"""Whether a job can run, and how far. The vendor's answers to most of these are unknown; ours are said here."""

from __future__ import annotations

import math

from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import SampleJob, SamplingParams

MOST_SAMPLES = 4096  # one request must not fill the memory of a worker that keeps other people's journals


def room_for_tokens(job: SampleJob, info: BaseModelInfo) -> int:
    """How many tokens each sequence may have: `max_tokens`, cut to what the context leaves.

    Raises UserError for a job that cannot run, with one sentence that says why.
    """
    _check_prompt(job, info)
    _check_params(job.params)
    if not 1 <= job.num_samples <= MOST_SAMPLES:
        raise UserError(f"num_samples is {job.num_samples}; it must be 1 to {MOST_SAMPLES}.")
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
