"""The parity of a sampler with plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sampler.jobs import ask, ask_all, full_logprobs, job, plain_model, prompt_of, random_adapter
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import IN_PLACE_OF_A_GPU, SAMPLERS

pytestmark = pytest.mark.parametrize("sampler", [*SAMPLERS, *IN_PLACE_OF_A_GPU], indirect=True)
every_model = pytest.mark.parametrize("model", ["qwen3", "llama3", "qwen3-tied", "qwen3-moe"], indirect=True)
TOLERANCE = 1e-4


@every_model
@pytest.mark.parametrize("length", [1, 2, 16, 17, 100], ids="prompt of {}".format)
def test_logprobs_are_those_of_one_full_forward(sampler: Sampler, model: TorchModel, length: int) -> None:
    prompt = prompt_of(length)
    sequence = ask(sampler, job(prompt, max_tokens=20, temperature=0.7)).sequences[0]
    expected = full_logprobs(plain_model(model), [*prompt, *sequence.tokens])[length - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE)


@every_model
@pytest.mark.parametrize(
    ("rank", "families"),
    [(8, ("attn", "mlp", "unembed")), (5, ("attn",)), (12, ("unembed",)), (40, ("mlp", "unembed"))],
    ids=["all", "attention", "unembed", "mlp and unembed"],
)
def test_an_adapter_gives_the_logprobs_of_merged_weights(
    sampler: Sampler, model: TorchModel, rank: int, families: tuple[str, ...]
) -> None:
    state = random_adapter(model, rank=rank, families=families)
    sampler.load_adapter("tuned", state)
    prompt = prompt_of(40)
    outcome = ask(sampler, job(prompt, adapter="tuned", prompt_logprobs=True))
    tokens = [*prompt, *outcome.sequences[0].tokens]
    expected = full_logprobs(plain_model(model, state), tokens)
    found = [*outcome.prompt_logprobs[1:], *outcome.sequences[0].logprobs]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert not np.allclose(found, full_logprobs(plain_model(model), tokens), atol=0.01)


def test_adapters_of_one_batch_do_not_mix(sampler: Sampler, model: TorchModel) -> None:
    states = {f"adapter-{n}": random_adapter(model, seed=n, rank=4 + n) for n in range(3)}
    for key, state in states.items():
        sampler.load_adapter(key, state)
    keys = ["", *states, *states, ""]
    jobs = [job(prompt_of(20, seed=n), adapter=key, max_tokens=12) for n, key in enumerate(keys)]
    for asked, outcome in zip(jobs, ask_all(sampler, jobs), strict=True):
        plain = plain_model(model, states.get(asked.adapter_key))
        expected = full_logprobs(plain, [*asked.prompt, *outcome.sequences[0].tokens])[19:]
        np.testing.assert_allclose(outcome.sequences[0].logprobs, expected, atol=TOLERANCE)


@every_model
@pytest.mark.parametrize("length", [3, 70], ids="prompt of {}".format)
def test_greedy_samples_equal_those_of_transformers(sampler: Sampler, model: TorchModel, length: int) -> None:
    prompt = prompt_of(length)
    with torch.no_grad():
        generated = plain_model(model).generate(
            torch.tensor(prompt[None].astype(np.int64)),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            min_new_tokens=30,
            pad_token_id=0,
            eos_token_id=None,
        )
    sequence = ask(sampler, job(prompt, max_tokens=30, temperature=0.0)).sequences[0]
    assert sequence.tokens.tolist() == generated[0, length:].tolist()


def test_a_sequence_that_outgrows_its_batch_continues_unchanged(sampler: Sampler, model: TorchModel) -> None:
    prompt = prompt_of(230)
    sequence = ask(sampler, job(prompt, max_tokens=330)).sequences[0]
    expected = full_logprobs(plain_model(model), [*prompt, *sequence.tokens])[229:]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE)


def test_sampled_logprobs_equal_the_prompt_logprobs_of_the_same_text(sampler: Sampler) -> None:
    prompt = prompt_of(33)
    sequence = ask(sampler, job(prompt, max_tokens=40, temperature=1.3)).sequences[0]
    scored = ask(sampler, job([*prompt, *sequence.tokens], max_tokens=1, prompt_logprobs=True)).prompt_logprobs
    np.testing.assert_allclose(sequence.logprobs, scored[33:], atol=TOLERANCE)


@pytest.mark.parametrize("length", [2, 16, 17, 18, 33, 100], ids="prompt of {}".format)
def test_prompt_logprobs_cover_all_but_the_first_token(sampler: Sampler, model: TorchModel, length: int) -> None:
    prompt = prompt_of(length)
    scored = ask(sampler, job(prompt, max_tokens=1, prompt_logprobs=True)).prompt_logprobs
    assert scored.dtype == np.float32
    assert np.isnan(scored[0])
    np.testing.assert_allclose(scored[1:], full_logprobs(plain_model(model), prompt), atol=TOLERANCE)


@pytest.mark.parametrize("last_n", [0, 1, 2, 15, 16, 17, 49, 50, 99])
def test_prompt_logprobs_of_the_last_tokens_only(sampler: Sampler, last_n: int) -> None:
    prompt = prompt_of(50)
    whole = ask(sampler, job(prompt, max_tokens=1, prompt_logprobs=True)).prompt_logprobs
    part = ask(sampler, job(prompt, max_tokens=1, prompt_logprobs=True, last_n=last_n)).prompt_logprobs
    first = max(1, 50 - last_n)
    assert np.isnan(part[:first]).all()
    np.testing.assert_allclose(part[first:], whole[first:], atol=TOLERANCE)
