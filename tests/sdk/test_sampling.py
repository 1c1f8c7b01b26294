"""Sampling through the unmodified SDK."""

from __future__ import annotations

import pytest
import tinker
from support.client.sdk import adam, next_token_datum
from tinker import types

from .conftest import MODEL

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
PROMPT = types.ModelInput.from_ints(TOKENS[:4])


def params(**options: object) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 8, "seed": 7, **options})  # type: ignore[arg-type]


@pytest.fixture
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """Return a model that has learned to say TOKENS."""
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    for _ in range(30):
        model.forward_backward([next_token_datum(TOKENS)] * 2, "cross_entropy")
        step = model.optim_step(adam(5e-3))
    step.result()
    return model


@pytest.fixture
def base(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=MODEL).result()


def test_a_trained_adapter_says_what_it_learned_and_the_base_model_does_not(
    trained: tinker.TrainingClient, base: tinker.SamplingClient
) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    greedy = params(temperature=0, max_tokens=4)
    answer = sampler.sample(PROMPT, 1, greedy).result().sequences[0]
    assert answer.tokens == TOKENS[4:]
    assert base.sample(PROMPT, 1, greedy).result().sequences[0].tokens != TOKENS[4:]


def test_sampler_and_trainer_agree_on_logprobs(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    trainer = trained.forward([next_token_datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert scored[0] is None
    assert scored[1:] == pytest.approx(trainer, abs=1e-4)


def test_a_sampling_client_keeps_its_weights_while_training_continues(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(PROMPT).result()
    trained.forward_backward([next_token_datum(TOKENS[::-1])], "cross_entropy")
    trained.optim_step(adam()).result()
    newer = trained.save_weights_and_get_sampling_client().result()
    assert sampler.compute_logprobs(PROMPT).result() == before
    assert newer.compute_logprobs(PROMPT).result() != before


def test_trap_21_four_hundred_samples_at_once_all_arrive(base: tinker.SamplingClient) -> None:
    futures = [base.sample(PROMPT, 1, params(max_tokens=2, seed=index)) for index in range(400)]
    assert all(len(future.result().sequences[0].tokens) == 2 for future in futures)
