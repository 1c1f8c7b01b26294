"""Tokens that are not in the prompt: which requests they take, and how their answers are put together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.sampler.jobs import job, prompt_of
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import EMPTY_LOGPROB, NO_TARGET, SampleJob, Sequence
from tinsmith_trainer.sampling.token_server.base import Generation, GenerationRequest, top_logprobs
from tinsmith_trainer.sampling.token_server.prefix_requests import (
    MOST_PREFIX_REQUESTS,
    alternative_tokens,
    plan_prefixes,
    prompt_logprobs,
    topk_prompt_logprobs,
)

PROMPT = prompt_of(6)


def logprob_of(position: int, token: int) -> float:
    """Return the imagined model's logprob of a token at a position."""
    return -float(position * 1000 + token)


def drawn(request: GenerationRequest) -> Generation:
    """Draw as the imagined model does: the seed, or the length of the prompt."""
    place, token = len(request.prompt), len(request.prompt) if request.seed is None else request.seed % 500
    logprobs = np.array([logprob_of(place, token)], np.float32)
    candidates = np.array([logprob_of(place, token) for token in request.candidates], np.float32)
    topk = top_logprobs([{place + k: logprob_of(place, place + k) for k in range(request.topk)}], request.topk)
    return Generation(Sequence(np.array([token], np.int32), logprobs, False, topk), None, 0, candidates=candidates)


def asking(targets: np.ndarray) -> SampleJob:
    return replace(job(PROMPT), target_prompt_logprobs=targets)


def test_a_target_is_asked_for_behind_all_that_comes_before_its_place() -> None:
    targets = np.full((5, 1), NO_TARGET, np.int64)
    targets[1], targets[3] = 8, 9
    planned = plan_prefixes(asking(targets), "version")
    assert [(one.request.prompt.tolist(), one.request.candidates) for one in planned] == [
        (PROMPT[:4].tolist(), (9,)),
        (PROMPT[:2].tolist(), (8,)),
    ]
    assert {(one.request.adapter, one.request.max_tokens, one.request.seed) for one in planned} == {
        ("version", 1, None)
    }


def test_alternatives_are_drawn_in_each_place_but_the_first_from_all_tokens_at_the_jobs_temperature() -> None:
    asked = replace(job(PROMPT, temperature=0.7, top_k=3, top_p=0.5, seed=9), prompt_alt_tokens_k=3)
    planned = plan_prefixes(asked, None)
    assert sorted((one.row, one.draw) for one in planned if one.purpose == "drawn") == [
        (row, k) for row in range(5) for k in range(3)
    ]
    assert len({one.request.seed for one in planned}) == 15
    assert {(one.request.temperature, one.request.top_k, one.request.top_p) for one in planned} == {(0.7, -1, 1.0)}
    assert [one.request.seed for one in planned] == [one.request.seed for one in plan_prefixes(asked, None)]
    found = alternative_tokens(asked, planned, [drawn(one.request) for one in planned])
    assert found is not None
    for one in planned:
        token = found.tokens[one.row, one.draw]
        assert token == one.request.seed % 500
        assert found.logprobs[one.row, one.draw] == logprob_of(one.row + 1, token)


def test_the_longest_beginning_of_the_prompt_comes_first_so_that_the_server_has_the_others() -> None:
    targets = np.array([[3], [NO_TARGET], [3], [3], [3]])
    planned = plan_prefixes(replace(asking(targets), prompt_alt_tokens_k=2), None)
    lengths = [len(one.request.prompt) for one in planned]
    assert lengths == sorted(lengths, reverse=True)


def test_a_job_that_would_flood_its_server_is_refused_with_the_remedy() -> None:
    prompt = prompt_of(MOST_PREFIX_REQUESTS // 2 + 1)
    assert len(plan_prefixes(replace(job(prompt), prompt_alt_tokens_k=2), None)) == MOST_PREFIX_REQUESTS
    with pytest.raises(
        UserError, match=r"^prompt_alt_tokens_k would take 6144 requests .* server; 4096 are the most\. .* builtin\.$"
    ):
        plan_prefixes(replace(job(prompt), prompt_alt_tokens_k=3), None)
    targets = np.zeros((len(prompt) - 1, 1), np.int64)
    both = replace(job(prompt), prompt_alt_tokens_k=2, target_prompt_logprobs=targets)
    with pytest.raises(UserError, match=r"^target_prompt_logprobs and prompt_alt_tokens_k would take 6144 requests"):
        plan_prefixes(both, None)


# --- prompts that a server would score without an adapter's unembedding ---


@pytest.mark.parametrize("last_n", [None, 0, 1, 3, 5, 99])
def test_a_prompt_is_scored_by_draws_after_its_prefixes(last_n: int | None) -> None:
    first = 1 if last_n is None else max(1, 6 - last_n)
    asked = job(PROMPT, prompt_logprobs=True, last_n=last_n, topk_prompt=2)
    planned = plan_prefixes(asked, "version", first if first < 6 else None, head=True)
    assert len(planned) == 2 * (6 - first)
    assert all(one.request.head for one in planned)
    assert not any(one.request.topk and one.request.candidates for one in planned), "no server does both at once"
    results = [drawn(one.request) for one in planned]
    own = [np.nan] * first + [logprob_of(place, PROMPT[place]) for place in range(first, 6)]
    np.testing.assert_array_equal(prompt_logprobs(asked, planned, results), np.array(own, np.float32))
    topk = topk_prompt_logprobs(asked, planned, results)
    assert topk.logprobs[:first].tolist() == [[EMPTY_LOGPROB] * 2] * first
    assert topk.token_ids[first:].tolist() == [[place, place + 1] for place in range(first, 6)]


def test_a_prompt_that_is_too_long_for_that_is_refused_with_the_reason() -> None:
    asked = job(prompt_of(MOST_PREFIX_REQUESTS + 2), prompt_logprobs=True)
    with pytest.raises(
        UserError, match=r"^prompt_logprobs would take 4097 requests .* leave out the unembedding of an"
    ):
        plan_prefixes(asked, "version", 1, head=True)
