"""The conversion of a job to requests for a token server, and of the answers to the job's outcome.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.checks import room_for_tokens
from tinsmith_trainer.sampling.stops import StopRule
from tinsmith_trainer.sampling.token_server.base import Generation, GenerationRequest, seed_of
from tinsmith_trainer.sampling.token_server.prefix_requests import (
    PrefixRequest,
    alternative_tokens,
    plan_prefixes,
    prompt_logprobs,
    target_logprobs,
    topk_prompt_logprobs,
)
from tinsmith_trainer.sampling.token_server.served_model import ServedModel
from tinsmith_trainer.sampling.token_text import ends_within_character

MOST_NAMED_TOKENS = 1 << 21
"""The limit on most likely tokens in one answer of a server.

An answer with this number of tokens is a text of 150 MB.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a job: one request for each sample, and requests for prefixes of the prompt.

    If a plan has no requests, the outcome is already known. `max_tokens` is the limit for each sequence. A request has
    at least one token, because no server draws zero tokens; if `max_tokens` is 0, the request only scores the prompt.
    """

    job: SampleJob
    rule: StopRule
    max_tokens: int
    requests: tuple[GenerationRequest, ...]
    prefixes: tuple[PrefixRequest, ...] = ()


def plan_generation_requests(
    job: SampleJob, adapter: str | None, model: ServedModel, *, head: bool = False, scored_by_prefixes: bool = False
) -> Plan:
    """Plan the requests.

    `head`: the adapter changes the unembedding. `scored_by_prefixes`: the server's own scores of the prompt do not
    include the adapter's change of the unembedding, so the prompt is scored by prefixes. Raises UserError, with the
    reason, for a job that cannot run.
    """
    if job.images:
        raise UserError("The prompt has images, which this sampler's token server is not given. Send text alone.")
    max_tokens = room_for_tokens(job, model.info)
    rule = StopRule.of(job.params, model.eos_token_ids)
    scored_from = _first_scored(job)
    _check_named("topk_prompt_logprobs", job.topk_prompt_logprobs, len(job.prompt) - (scored_from or 0))
    _check_named("topk_sample_logprobs", job.topk_sample_logprobs, max_tokens)
    prompt = job.prompt
    by_prefixes = scored_from if scored_by_prefixes else None
    if len(prompt) == model.info.max_sequence_length and scored_from is not None and not scored_by_prefixes:
        # Servers draw at least one token, so they refuse a prompt that fills the context.
        prompt, by_prefixes = prompt[:-1], len(prompt) - 1
    prefixes = plan_prefixes(job, adapter, by_prefixes, head=head)
    if scored_from == by_prefixes:
        scored_from = None
    if max_tokens == 0 and scored_from is None:
        return Plan(job, rule, 0, (), prefixes)
    params = job.params
    first = GenerationRequest(
        adapter=adapter,
        prompt=prompt,
        max_tokens=max(1, max_tokens),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=None,
        stop_token_ids=tuple(sorted(rule.token_ids)),
        stop_strings=_sought_by_server(rule, job, model),
        topk=job.topk_sample_logprobs if max_tokens else 0,
        head=head,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        grammar=job.grammar.lark if job.grammar is not None else "",
    )
    count = 1 if max_tokens == 0 else job.num_samples
    requests = [replace(first, seed=seed_of(job, index)) for index in range(count)]
    if scored_from is not None:
        requests[0] = replace(requests[0], scored_from=scored_from, topk_prompt=job.topk_prompt_logprobs)
    return Plan(job, rule, max_tokens, tuple(requests), prefixes)


def outcome_of(plan: Plan, drawn: Items[Generation], behind: Items[Generation], model: ServedModel) -> SampleOutcome:
    """Return the outcome, from the answers for the samples and the answers for the prompt's prefixes.

    The answers for samples and the answers for prefixes are in the order of the plan. Raises UserError if the answer
    has no logprobs, for example if the model has diverged.
    """
    job = plan.job
    sequences = [_finished(plan, one.sequence, model) for one in drawn] if plan.max_tokens else []
    sequences += [_empty(job)] * (job.num_samples - len(sequences))
    if not all(np.isfinite(sequence.logprobs).all() for sequence in sequences):
        raise UserError("The logprobs of what was sampled are not finite: the weights have diverged.")
    first = drawn[0] if drawn else None
    return SampleOutcome(
        sequences=tuple(sequences),
        prompt_logprobs=_scores(plan, first, behind),
        prompt_cache_hit_tokens=next((one.cached_tokens for one in (*behind, *drawn)), 0),
        topk_prompt_logprobs=_topk_prompt(plan, first, behind),
        target_prompt_logprobs=target_logprobs(job, plan.prefixes, behind),
        prompt_alt_tokens=alternative_tokens(job, plan.prefixes, behind),
        prompt_tokens=len(job.prompt),
        masked_logprobs=any(one.masked_logprobs for one in drawn),
    )


def _check_named(name: str, k: int, positions: int) -> None:
    if k * positions > MOST_NAMED_TOKENS:
        raise UserError(
            f"{name} is {k} for {positions} positions; this sampler's server answers in text, which has room for "
            f"{MOST_NAMED_TOKENS // positions} at each. Ask for fewer, or sample from a session or from a pool with "
            "engine: builtin."
        )


def _scores(plan: Plan, first: Generation | None, behind: Items[Generation]) -> NDArray[np.float32] | None:
    if not plan.job.prompt_logprobs:
        return None
    scored = first.prompt_logprobs if first is not None else None
    if scored is not None and len(scored) == len(plan.job.prompt):
        return scored
    found = prompt_logprobs(plan.job, plan.prefixes, behind)
    if scored is not None:
        found[: len(scored)] = scored
    return found


def _topk_prompt(plan: Plan, first: Generation | None, behind: Items[Generation]) -> TopkLogprobs | None:
    if not plan.job.topk_prompt_logprobs:
        return None
    scored = first.topk_prompt if first is not None else None
    if scored is not None and len(scored.token_ids) == len(plan.job.prompt):
        return scored
    found = topk_prompt_logprobs(plan.job, plan.prefixes, behind)
    if scored is not None:
        found.token_ids[: len(scored.token_ids)] = scored.token_ids
        found.logprobs[: len(scored.logprobs)] = scored.logprobs
    return found


def _sought_by_server(rule: StopRule, job: SampleJob, model: ServedModel) -> tuple[str, ...]:
    """Return the stop strings that the server searches for.

    This process always cuts the text; with the strings, the server draws fewer unnecessary tokens. If the prompt ends
    within a character, the server gets no strings: vLLM would also search the prompt, and could stop at a string in the
    prompt.
    """
    if rule.strings and ends_within_character(job.prompt.tolist(), model.tokenizer):
        return ()
    return rule.strings


def _first_scored(job: SampleJob) -> int | None:
    """Return the first prompt position that needs a logprob, or None."""
    if not job.prompt_logprobs and not job.topk_prompt_logprobs:
        return None
    length, last_n = len(job.prompt), job.prompt_logprobs_last_n
    first = 1 if last_n is None else max(1, length - last_n)
    return first if first < length else None


def _finished(plan: Plan, drawn: Sequence, model: ServedModel) -> Sequence:
    """Return the sequence, cut after the token that ends the sequence.

    The built-in sampler cuts after the same token.
    """
    watch = plan.rule.watch(model.tokenizer, plan.job.prompt)
    for index, token in enumerate(drawn.tokens.tolist(), 1):
        if watch.sees_end(token):
            return _cut(drawn, index)
    return drawn


def _cut(drawn: Sequence, length: int) -> Sequence:
    topk = drawn.topk_logprobs
    if topk is not None:
        topk = TopkLogprobs(topk.token_ids[:length], topk.logprobs[:length])
    return Sequence(drawn.tokens[:length], drawn.logprobs[:length], stopped=True, topk_logprobs=topk)


def _empty(job: SampleJob) -> Sequence:
    topk = TopkLogprobs.empty(0, job.topk_sample_logprobs) if job.topk_sample_logprobs else None
    return Sequence(np.array([], np.int32), np.array([], np.float32), stopped=False, topk_logprobs=topk)
