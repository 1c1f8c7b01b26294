"""Checks of a job before the job runs.

Most limits of the vendor's service are unknown, so this server has its own limits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import NO_TARGET, SampleJob, SampleOutcome, SamplingParams
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

MOST_SAMPLES = 4096  # one request must not fill the memory of a worker that holds other tenants' journals
MOST_LOGPROBS = 1 << 24
"""The limit on the number of logprobs in an answer: 128 MiB with the token IDs.

Logprobs of drawn tokens do not count for this limit.

The limit exists because workers keep answers in memory for some time.
"""
MOST_TOPK = 1024
"""The limit on the most likely tokens per position.

Token servers answer in text, and wider rows would take longer than the model.
"""
MOST_PENALTY = 2
MOST_BIAS = 100
MOST_ECHOED_TEXTS = 1 << 17
"""The limit on the number of texts in an echo: the prompt's tokens and the most likely alternatives, in all sequences.

Each text takes 15 µs to decode and 75 bytes of memory, so at this limit, an echo takes two seconds and ten megabytes.
Without this limit, an echo could take minutes and gigabytes.
"""


def room_for_tokens(job: SampleJob, info: BaseModelInfo, longest: int | None = None) -> int:
    """Return the maximum number of tokens per sequence: `max_tokens`, limited by the context and by `longest`.

    A prompt as long as the context may be scored if no token is drawn. Raises UserError, with the reason, for a job
    that cannot run.
    """
    _check_prompt(job, info)
    _check_params(job.params)
    _check_stop_tokens(job.params, info.vocab_size)
    _check_logit_changes(job.params, info.vocab_size)
    if not 1 <= job.num_samples <= MOST_SAMPLES:
        raise UserError(f"num_samples is {job.num_samples}; it must be 1 to {MOST_SAMPLES}.")
    if job.prompt_logprobs_last_n is not None and job.prompt_logprobs_last_n < 0:
        raise UserError(f"prompt_logprobs_last_n is {job.prompt_logprobs_last_n}; it must not be negative.")
    most = info.max_sequence_length if longest is None else min(longest, info.max_sequence_length)
    room = most - len(job.prompt)
    if room < 0 or (room == 0 and not _scores_prompt(job)):
        why = "the model's context is" if most == info.max_sequence_length else "this worker has memory for"
        raise UserError(
            f"The prompt has {len(job.prompt)} tokens and leaves no room to sample: {why} {most} tokens. "
            "Shorten the prompt."
        )
    max_tokens = room if job.params.max_tokens is None else min(job.params.max_tokens, room)
    _check_alternatives(job, info.vocab_size)
    if job.target_prompt_logprobs is not None:
        _check_targets(job.target_prompt_logprobs, len(job.prompt), info.vocab_size)
    _check_room(job, max_tokens)
    return max_tokens


def _scores_prompt(job: SampleJob) -> bool:
    scores = job.prompt_logprobs or job.topk_prompt_logprobs or job.prompt_alt_tokens_k
    return bool(scores) or job.target_prompt_logprobs is not None


def check_echo(job: SampleJob) -> None:
    """Check the size of an echo with logprobs; the answer has one echo for each sequence. Raises UserError."""
    texts = job.num_samples * len(job.prompt) * (1 + job.topk_prompt_logprobs)
    if texts > MOST_ECHOED_TEXTS:
        raise UserError(
            f"echo with logprobs asks for {texts} texts: {job.num_samples} times a prompt of {len(job.prompt)} tokens, "
            f"each with {job.topk_prompt_logprobs} of the likeliest; an answer has room for {MOST_ECHOED_TEXTS}. "
            "Ask for a smaller n or fewer logprobs, or shorten the prompt."
        )


def with_token_behind(request: worker_pb2.SampleRequest, outcome: SampleOutcome) -> SampleOutcome:
    """Return an error if no token can be drawn after an echo with logprobs, although the request asks for a token.

    lm-evaluation-harness requests one token, and ignores the last token of the answer.
    """
    reading = request.reading
    is_scored = reading.echo and reading.logprobs and outcome.prompt_logprobs is not None
    if not is_scored or request.max_tokens == 0 or any(len(sequence.tokens) for sequence in outcome.sequences):
        return outcome
    error = UserError(
        f"The prompt has {outcome.prompt_tokens} tokens and fills the context, so that no token can be drawn behind "
        "it. Send max_tokens: 0 to score it, or shorten it."
    )
    return SampleOutcome(error=error, started_at=outcome.started_at)


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


def _check_stop_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a stop token that can never be drawn.

    With a stop token that can never be drawn, each sequence would run to the full length.
    """
    outside = [token for token in params.stop_tokens or () if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"stop has token {outside[0]}, which the model never draws: its vocabulary is 0 to {vocab_size - 1}. "
            "Take the stop tokens from this model's tokenizer."
        )


def _check_logit_changes(params: SamplingParams, vocab_size: int) -> None:
    for name, penalty in (
        ("frequency_penalty", params.frequency_penalty),
        ("presence_penalty", params.presence_penalty),
    ):
        if not abs(penalty) <= MOST_PENALTY:
            raise UserError(f"{name} is {penalty}; it must be -{MOST_PENALTY} to {MOST_PENALTY}.")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise UserError(f"logit_bias has token {token}; the model's vocabulary is 0 to {vocab_size - 1}.")
        if not abs(bias) <= MOST_BIAS:
            raise UserError(f"logit_bias of token {token} is {bias}; it must be -{MOST_BIAS} to {MOST_BIAS}.")


def _check_alternatives(job: SampleJob, vocab_size: int) -> None:
    topk = min(MOST_TOPK, vocab_size)
    for name, k, most in (
        ("topk_prompt_logprobs", job.topk_prompt_logprobs, topk),
        ("topk_sample_logprobs", job.topk_sample_logprobs, topk),
        # draws repeat tokens, so the vocabulary is no upper limit
        ("prompt_alt_tokens_k", job.prompt_alt_tokens_k, MOST_TOPK),
    ):
        if not 0 <= k <= most:
            raise UserError(f"{name} is {k}; it must be 0 to {most}.")


def _check_targets(targets: NDArray[np.int64], prompt_tokens: int, vocab_size: int) -> None:
    if targets.ndim != 2 or len(targets) != prompt_tokens - 1:
        raise UserError(
            f"target_prompt_logprobs has shape {list(targets.shape)}; a prompt of {prompt_tokens} tokens needs "
            f"[{prompt_tokens - 1}, K], a row for each token after the first."
        )
    outside = targets[(targets < NO_TARGET) | (targets >= vocab_size)]
    if len(outside):
        raise UserError(
            f"target_prompt_logprobs names token {outside[0]}; the model's vocabulary is 0 to {vocab_size - 1}, "
            f"and {NO_TARGET} asks for nothing."
        )
    if not np.any(targets != NO_TARGET):
        raise UserError("target_prompt_logprobs names no token; name one at least, or leave it out.")


def _check_room(job: SampleJob, max_tokens: int) -> None:
    """Check the size of all requested values together."""
    targets = job.target_prompt_logprobs
    room = MOST_LOGPROBS
    for name, k, positions in (
        ("target_prompt_logprobs", 0 if targets is None else targets.shape[1], len(job.prompt)),
        ("topk_prompt_logprobs", job.topk_prompt_logprobs, len(job.prompt)),
        ("prompt_alt_tokens_k", job.prompt_alt_tokens_k, len(job.prompt)),
        ("topk_sample_logprobs", job.topk_sample_logprobs, job.num_samples * max_tokens),
    ):
        if k * positions > room:
            raise UserError(
                f"{name} asks for {k} logprobs at each of {positions} positions; the answer has room for "
                f"{room // positions} at each. Ask for fewer, of fewer positions, or in several requests."
            )
        room -= k * positions
