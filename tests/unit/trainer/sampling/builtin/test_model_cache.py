"""Models that keep more than keys and values are sampled with their own caches, under the same promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sampler.jobs import (
    ask,
    ask_all,
    bits,
    full_logprobs,
    job,
    plain_model,
    prompt_of,
    random_adapter,
    submit,
)
from support.tiny_vision import vision_model
from support.zoo.families import family_model
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import DrawnToken
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.jobs import Sample
from tinsmith_trainer.sampling.builtin.model_cache.batch import CacheBatch
from tinsmith_trainer.sampling.builtin.model_cache.choice import choose_forward
from tinsmith_trainer.sampling.builtin.model_cache.forward import CacheForward, Trial
from transformers.cache_utils import LinearAttentionLayer

OWN_CACHE = ("lfm2", "mamba")
"""A model of convolutions and attention, and one of states alone, which no cached block can continue."""


@contextmanager
def sampler_of(model_type: str, *, deterministic: bool = False, max_rows: int = 4) -> Iterator[BuiltinSampler]:
    settings = BuiltinSamplerSettings(deterministic=deterministic, max_rows=max_rows, prefill_block_tokens=16)
    sampler = BuiltinSampler(family_model(model_type), settings)
    try:
        yield sampler
    finally:
        sampler.close()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return prompt_of(length, seed, vocab_size=304)


@pytest.mark.parametrize("model_type", OWN_CACHE)
def test_logprobs_are_those_of_one_forward_over_all_tokens(model_type: str) -> None:
    model = family_model(model_type)
    assert isinstance(choose_forward(model), CacheForward)
    adapter = random_adapter(model)
    jobs = [
        job(prompt(40), num_samples=3, prompt_logprobs=True),
        job(prompt(1), max_tokens=12),
        job(prompt(40), adapter="tuned", num_samples=2),
    ]
    with sampler_of(model_type) as sampler:
        sampler.load_adapter("tuned", adapter)
        outcomes = ask_all(sampler, jobs)
    for asked, outcome in zip(jobs, outcomes, strict=True):
        plain = plain_model(model, adapter if asked.adapter_key else None)
        for sequence in outcome.sequences:
            expected = full_logprobs(plain, [*asked.prompt, *sequence.tokens])
            np.testing.assert_allclose(sequence.logprobs, expected[len(asked.prompt) - 1 :], atol=1e-4)
    np.testing.assert_allclose(
        outcomes[0].prompt_logprobs[1:], full_logprobs(plain_model(model), prompt(40)), atol=1e-4
    )


@pytest.mark.parametrize("model_type", OWN_CACHE)
def test_company_changes_no_bit_in_deterministic_mode(model_type: str) -> None:
    jobs = [job(prompt(20, seed), num_samples=2, temperature=0.9, seed=seed) for seed in range(3)]
    with sampler_of(model_type, deterministic=True) as sampler:
        assert [bits(outcome) for outcome in ask_all(sampler, jobs)] == [bits(ask(sampler, each)) for each in jobs]


def test_samples_of_one_prompt_share_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    step = CacheForward.step

    def counted(self: CacheForward, states: list[object], *rest: object) -> object:
        rows.append(len(states))
        return step(self, states, *rest)  # type: ignore[arg-type]

    with sampler_of("lfm2") as sampler:
        monkeypatch.setattr(CacheForward, "step", counted)
        ask(sampler, job(prompt(20), num_samples=4, max_tokens=6))
    assert rows == [4] * 6


@pytest.mark.parametrize(("model_type", "goes_on"), [("lfm2", 32), ("mamba", 0)])
def test_cached_tokens_of_a_prompt_are_not_recomputed(model_type: str, goes_on: int) -> None:
    with sampler_of(model_type, deterministic=True) as sampler:
        first = ask(sampler, job(prompt(40)))
        again = ask(sampler, job(prompt(40)))
        longer = ask(sampler, job([*prompt(40), 5, 6, 7]))
    assert [each.prompt_cache_hit_tokens for each in (first, again, longer)] == [0, 39, goes_on]
    assert bits(again) == bits(first)


def test_a_sample_that_loses_its_row_to_another_tenant_has_the_same_result() -> None:
    flood = [job(prompt(20, seed), max_tokens=40, seed=seed) for seed in range(2)]
    with sampler_of("lfm2", deterministic=True, max_rows=1) as sampler:
        alone = [bits(ask(sampler, each)) for each in flood]
        others = [replace(job(prompt(9, seed), max_tokens=40), tenant="other") for seed in range(2)]
        together = ask_all(sampler, [each for pair in zip(flood, others, strict=True) for each in pair])
    assert [bits(outcome) for outcome in together[::2]] == alone


def test_a_model_that_forgets_is_refused_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: LinearAttentionLayer, states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros_like(states)

    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", forget)
    with pytest.raises(ServerError, match=r"Lfm2ForCausalLM: with transformers' own cache, too, .* apart"):
        BuiltinSampler(family_model("lfm2"))


def test_images_are_promised_only_where_keys_and_values_are_enough() -> None:
    seeing = vision_model()
    promised = []
    for forward in (ForwardPass(seeing), CacheForward(seeing, Trial(seeing))):
        sampler = BuiltinSampler(seeing, forward=forward)
        promised.append(sampler.takes_images)
        sampler.close()
    assert promised == [True, False]


def test_a_fault_in_a_step_answers_the_samples_that_would_have_ended_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = CacheBatch._compute

    def failing(self: CacheBatch, samples: list[Sample]) -> Sequence[DrawnToken]:
        if samples[0].run.job.request_id == "fails":
            raise MemoryError("a made-up lack of memory")
        return compute(self, samples)

    monkeypatch.setattr(CacheBatch, "_compute", failing)
    jobs = [job(prompt(10), max_tokens=1), job(prompt(20), request_id="fails")]
    with sampler_of("lfm2") as sampler:
        with family_model("lfm2").shared_device.turns.held(Use.TRAINING):
            waiting = [submit(sampler, each) for each in jobs]
        assert [type(answer.get().error) for answer in waiting] == [ServerError, ServerError]
