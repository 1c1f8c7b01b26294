"""Alternatives of the model from servers of other makers: the likeliest, named and drawn tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.sampler.jobs import all_logprobs, ask, ask_all, job, plain_model, prompt_of, random_adapter, submit
from support.token_server.shared import ServerHand, SharedServer
from support.waiting import until
from tinsmith_trainer.sampling.base import EMPTY_LOGPROB, NO_TARGET, Sampler, TopkLogprobs
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import EVERY_TOKEN_SERVER, shared_server

PROMPT = prompt_of(40)
TOLERANCE = 1e-4
with_and_without_an_adapter = pytest.mark.parametrize("adapter", ["", "tuned"], ids=["base", "adapter"])


@pytest.fixture(params=EVERY_TOKEN_SERVER)
def server(request: pytest.FixtureRequest) -> SharedServer:
    return shared_server(request, request.param)


@pytest.fixture
def sampler(server: SharedServer, model: TorchModel) -> Iterator[Sampler]:
    """Return the sampler with an adapter `tuned`."""
    sampler = server.sampler()
    sampler.load_adapter("tuned", random_adapter(model))
    yield sampler
    sampler.close()


@pytest.fixture
def hand(server: SharedServer) -> ServerHand:
    return server.hand


def expected(model: TorchModel, adapter: str, tokens: object) -> np.ndarray:
    """Logprobs of the whole vocabulary, at each position but the first, by plain transformers."""
    return all_logprobs(plain_model(model, random_adapter(model) if adapter else None), tokens)


def assert_likeliest(found: TopkLogprobs, logprobs: np.ndarray) -> None:
    """Compare within the tolerance, because less may decide which of two tokens is likelier."""
    k = found.token_ids.shape[1]
    np.testing.assert_allclose(found.logprobs, -np.sort(-logprobs, axis=1)[:, :k], atol=TOLERANCE)
    np.testing.assert_allclose(np.take_along_axis(logprobs, found.token_ids, axis=1), found.logprobs, atol=TOLERANCE)
    assert all(len(set(row)) == k for row in found.token_ids.tolist())


@with_and_without_an_adapter
def test_the_likeliest_tokens_are_those_of_one_full_forward(sampler: Sampler, model: TorchModel, adapter: str) -> None:
    """At temperature 1 and of the whole vocabulary, whatever is drawn from."""
    asked = job(PROMPT, adapter=adapter, num_samples=2, temperature=0.5, top_k=20, topk_prompt=7, topk_sample=5)
    outcome = ask(sampler, asked)
    prompt = outcome.topk_prompt_logprobs
    assert prompt is not None
    assert (prompt.logprobs[0] == np.float32(EMPTY_LOGPROB)).all()
    assert_likeliest(TopkLogprobs(prompt.token_ids[1:], prompt.logprobs[1:]), expected(model, adapter, PROMPT))
    for sequence in outcome.sequences:
        assert sequence.topk_logprobs is not None
        logprobs = expected(model, adapter, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :]
        assert_likeliest(sequence.topk_logprobs, logprobs)


def test_the_whole_vocabulary_can_be_named(sampler: Sampler) -> None:
    [sequence] = ask(sampler, job(PROMPT, max_tokens=2, topk_sample=512)).sequences
    assert sequence.topk_logprobs is not None
    assert sorted(sequence.topk_logprobs.token_ids[1].tolist()) == list(range(512))
    np.testing.assert_allclose(np.exp(sequence.topk_logprobs.logprobs).sum(1), 1, atol=TOLERANCE)


def test_the_likeliest_tokens_continue_past_an_end_that_was_not_requested(sampler: Sampler, model: TorchModel) -> None:
    asked = job(PROMPT, max_tokens=300, temperature=2.0, seed=11, topk_sample=2)
    [sequence] = ask(sampler, asked).sequences
    assert set(sequence.tokens) & set(model.eos_token_ids)
    assert sequence.topk_logprobs is not None
    assert_likeliest(sequence.topk_logprobs, expected(model, "", [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :])


@with_and_without_an_adapter
def test_named_tokens_get_their_logprobs_and_others_zero(sampler: Sampler, model: TorchModel, adapter: str) -> None:
    targets = np.random.default_rng(3).integers(NO_TARGET, 512, (len(PROMPT) - 1, 4))
    targets[5:20] = NO_TARGET
    found = ask(sampler, job(PROMPT, adapter=adapter, max_tokens=1, targets=targets)).target_prompt_logprobs
    assert found is not None
    logprobs = np.take_along_axis(expected(model, adapter, PROMPT), np.maximum(targets, 0), axis=1)
    np.testing.assert_allclose(found, np.where(targets == NO_TARGET, 0, logprobs), atol=TOLERANCE)


def test_one_place_can_have_more_named_tokens_than_a_server_takes_at_a_time(
    sampler: Sampler, model: TorchModel
) -> None:
    targets = np.full((len(PROMPT) - 1, 512), NO_TARGET)
    targets[-1] = np.arange(512)
    found = ask(sampler, job(PROMPT, max_tokens=1, targets=targets)).target_prompt_logprobs
    assert found is not None
    np.testing.assert_allclose(found[-1], expected(model, "", PROMPT)[-1], atol=TOLERANCE)


def test_jobs_that_name_tokens_harm_no_others_of_their_batch(sampler: Sampler, model: TorchModel) -> None:
    """A model runner of vLLM's gives all of a batch the named tokens of one, and SGLang's scheduler dies of it."""
    jobs = [
        job(PROMPT, max_tokens=12, topk_sample=3),
        job(PROMPT, targets=PROMPT[1:, None]),
        job(PROMPT, max_tokens=12, prompt_logprobs=True),
        job(PROMPT, max_tokens=12, topk_sample=3, topk_prompt=2, targets=PROMPT[1:, None]),
    ]
    for asked, outcome in zip(jobs, ask_all(sampler, jobs), strict=True):
        tokens = outcome.sequences[0].tokens
        logprobs = expected(model, "", [*PROMPT, *tokens])
        topk = outcome.sequences[0].topk_logprobs
        assert (topk is not None) == (asked.topk_sample_logprobs > 0)
        if topk is not None:
            assert_likeliest(topk, logprobs[len(PROMPT) - 1 :])
        for scores in (outcome.prompt_logprobs, outcome.target_prompt_logprobs):
            if scores is not None:
                own = np.take_along_axis(logprobs[: len(PROMPT) - 1], PROMPT[1:, None], axis=1)
                np.testing.assert_allclose(scores.reshape(-1)[-len(own) :], own[:, 0], atol=TOLERANCE)


def test_an_adapters_unembedding_is_in_the_scores_of_its_prompts_and_of_no_other(
    sampler: Sampler, model: TorchModel
) -> None:
    """vLLM leaves it out of the prompts of its own requests, and adds it to others of the same batch."""
    jobs = [
        job(PROMPT, adapter=adapter, max_tokens=6, prompt_logprobs=True, topk_prompt=2, last_n=last_n)
        for adapter, last_n in (("tuned", None), ("", None), ("tuned", 3), ("", 3))
    ]
    for asked, outcome in zip(jobs, ask_all(sampler, jobs), strict=True):
        logprobs = expected(model, asked.adapter_key, PROMPT)
        own = np.take_along_axis(logprobs, PROMPT[1:, None], axis=1)[:, 0]
        first = 1 if asked.prompt_logprobs_last_n is None else len(PROMPT) - asked.prompt_logprobs_last_n
        assert outcome.prompt_logprobs is not None
        assert np.isnan(outcome.prompt_logprobs[:first]).all()
        np.testing.assert_allclose(outcome.prompt_logprobs[first:], own[first - 1 :], atol=TOLERANCE)
        topk = outcome.topk_prompt_logprobs
        assert topk is not None
        assert_likeliest(TopkLogprobs(topk.token_ids[first:], topk.logprobs[first:]), logprobs[first - 1 :])


def test_a_cancelled_job_takes_its_named_tokens_from_the_server(sampler: Sampler, hand: ServerHand) -> None:
    with hand.held():
        asked = job(PROMPT, max_tokens=5, topk_sample=1, targets=PROMPT[1:, None])
        answer = submit(sampler, asked)
        until(lambda: hand.state()["running"] == 1)
        sampler.cancel(asked.request_id)
        assert "cancelled" in str(answer.get().error)
        until(lambda: hand.state()["running"] == 0)
    ask(sampler, job(PROMPT, topk_sample=1))
