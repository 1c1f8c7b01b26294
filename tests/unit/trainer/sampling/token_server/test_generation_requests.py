"""Jobs become requests, and answers become results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sampler.jobs import job, prompt_of
from support.tiny_models import tiny_directory
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import Sequence
from tinsmith_trainer.sampling.token_server.base import SEED_RANGE, Generation
from tinsmith_trainer.sampling.token_server.generation_requests import (
    MOST_NAMED_TOKENS,
    outcome_of,
    plan_generation_requests,
)
from tinsmith_trainer.sampling.token_server.served_model import ServedModel, read_model
from tinsmith_trainer.torch_model.base_model import Image

PROMPT = prompt_of(20)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return read_model(str(tiny_directory()))


def drawn(tokens: list[int], *, stopped: bool = False, cached_tokens: int = 0) -> Generation:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Generation(Sequence(np.array(tokens, np.int32), logprobs, stopped), None, cached_tokens)


def test_images_are_refused_since_no_server_is_given_them(model: ServedModel) -> None:
    with pytest.raises(UserError, match="The prompt has images, which this sampler's token server is not given"):
        plan_generation_requests(replace(job(PROMPT), images=(Image(1, b"a picture", "png"),)), None, model)


@given(seed=st.integers(-(2**63), 2**64 - 1), count=st.integers(1, 40))
def test_each_sample_of_a_job_has_its_own_seed_that_every_server_takes(
    model: ServedModel, seed: int, count: int
) -> None:
    plan = plan_generation_requests(job(PROMPT, seed=seed, num_samples=count), None, model)
    seeds = [request.seed for request in plan.requests]
    assert len(set(seeds)) == count
    assert all(seed is not None and 0 <= seed < SEED_RANGE for seed in seeds)
    assert seeds == [request.seed for request in plan_generation_requests(plan.job, None, model).requests]


def test_neighbouring_seeds_share_no_samples(model: ServedModel) -> None:
    seeds = [
        {
            request.seed
            for request in plan_generation_requests(job(PROMPT, seed=seed, num_samples=8), None, model).requests
        }
        for seed in range(8)
    ]
    assert len(set.union(*seeds)) == 64


@pytest.mark.parametrize(("text", "sought"), [("caf\u00e9", ("a",)), ("caf\u00e9 \u20ac", ())], ids=["whole", "cut"])
def test_a_server_seeks_no_stop_strings_behind_a_prompt_that_ends_within_a_character(
    model: ServedModel, text: str, sought: tuple[str, ...]
) -> None:
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    prompt = tokens if sought else tokens[:-1]
    asked = job(prompt, stop_tokens=None, stop_strings=("a",))
    [request] = plan_generation_requests(asked, None, model).requests
    assert request.stop_strings == sought


@pytest.mark.parametrize("params", [{"seed": None}, {"seed": 1, "temperature": 0.0}], ids=["unset", "greedy"])
def test_a_seed_without_an_effect_is_not_requested(model: ServedModel, params: dict[str, float | None]) -> None:
    [request] = plan_generation_requests(job(PROMPT, **params), None, model).requests
    assert request.seed is None


def test_a_prompt_is_scored_by_a_request_with_a_dropped_token(model: ServedModel) -> None:
    plan = plan_generation_requests(job(PROMPT, max_tokens=0, num_samples=3, prompt_logprobs=True), None, model)
    [request] = plan.requests
    assert request.max_tokens == 1
    scores = np.full(20, -1, np.float32)
    outcome = outcome_of(plan, [replace(drawn([7]), prompt_logprobs=scores)], [], model)
    assert [len(sequence.tokens) for sequence in outcome.sequences] == [0, 0, 0]
    assert outcome.prompt_logprobs is scores


@pytest.mark.parametrize(("last_n", "wholes"), [(None, 1), (5, 1), (1, 0)])
@pytest.mark.parametrize("by_prefixes", [False, True])
def test_no_server_is_sent_a_prompt_without_room_for_the_token_that_it_draws(
    model: ServedModel, last_n: int | None, wholes: int, by_prefixes: bool
) -> None:
    context = model.info.max_sequence_length
    asked = job(np.arange(context) % 200, max_tokens=1, prompt_logprobs=True, last_n=last_n or context)
    if by_prefixes and last_n is None:
        asked = replace(asked, prompt_logprobs_last_n=100)
    plan = plan_generation_requests(asked, None, model, scored_by_prefixes=by_prefixes)
    sent = [*plan.requests, *(one.request for one in plan.prefixes)]
    assert max(len(request.prompt) + request.max_tokens for request in sent) == context
    assert len(plan.requests) == (0 if by_prefixes else wholes)
    assert plan.prefixes[0].request.candidates == (int(asked.prompt[-1]),)


def test_unset_stops_are_the_models_own(model: ServedModel) -> None:
    [request] = plan_generation_requests(job(PROMPT, stop_tokens=None), None, model).requests
    assert request.stop_token_ids == model.eos_token_ids != ()


@given(tokens=st.lists(st.integers(0, 9), max_size=12), stop=st.integers(0, 9))
def test_a_sequence_is_cut_behind_its_stop_however_far_the_server_went(
    model: ServedModel, tokens: list[int], stop: int
) -> None:
    plan = plan_generation_requests(job(PROMPT, max_tokens=12, stop_tokens=(stop,)), None, model)
    [sequence] = outcome_of(plan, [drawn(tokens)], [], model).sequences
    expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
    assert sequence.tokens.tolist() == expected
    assert len(sequence.logprobs) == len(expected)
    assert sequence.stopped == (stop in tokens)


def test_a_stop_string_that_only_the_server_saw_counts(model: ServedModel) -> None:
    """Its text may differ, since the server skips its tokenizer's special tokens."""
    plan = plan_generation_requests(job(PROMPT, stop_tokens=None, stop_strings=("unseen",)), None, model)
    [sequence] = outcome_of(plan, [drawn([1, 2], stopped=True)], [], model).sequences
    assert (sequence.tokens.tolist(), sequence.stopped) == ([1, 2], True)


def test_weights_that_have_diverged_are_the_users_error(model: ServedModel) -> None:
    plan = plan_generation_requests(job(PROMPT), None, model)
    broken = Generation(Sequence(np.array([1], np.int32), np.array([np.nan], np.float32), stopped=False), None, 0)
    with pytest.raises(UserError, match="the weights have diverged"):
        outcome_of(plan, [broken], [], model)


# --- the most likely tokens ---


@pytest.mark.parametrize("name", ["topk_prompt_logprobs", "topk_sample_logprobs"])
def test_more_text_than_a_server_should_write_is_refused_before_it_is_asked(model: ServedModel, name: str) -> None:
    long = replace(model, info=replace(model.info, max_sequence_length=1 << 20))
    asked = job(prompt_of(MOST_NAMED_TOKENS // 256 + 1), max_tokens=MOST_NAMED_TOKENS // 256)
    assert plan_generation_requests(replace(asked, **{name: 256}), None, long).requests
    with pytest.raises(UserError, match=rf"{name} is 257 for 8192 positions.* has room for 256 at each"):
        plan_generation_requests(replace(asked, **{name: 257}), None, long)


def test_a_prompt_that_the_server_would_score_wrongly_is_not_scored_by_it(model: ServedModel) -> None:
    """The server applies an adapter's unembedding only to logprobs of drawn tokens."""
    asked = replace(job(PROMPT, num_samples=2, prompt_logprobs=True), topk_prompt_logprobs=2)
    plan = plan_generation_requests(asked, "version", model, head=True, scored_by_prefixes=True)
    assert [(one.scored_from, one.topk_prompt, one.head) for one in plan.requests] == [(None, 0, True)] * 2
    assert len(plan.prefixes) == 2 * 19
    assert (
        plan_generation_requests(
            replace(asked, params=replace(asked.params, max_tokens=0)),
            "version",
            model,
            head=True,
            scored_by_prefixes=True,
        ).requests
        == ()
    )
    by_server = plan_generation_requests(asked, "version", model, head=True)
    assert by_server.requests[0].scored_from == 1
    assert by_server.prefixes == ()
