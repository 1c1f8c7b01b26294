"""Sampling through the unmodified SDK."""

from __future__ import annotations

import math

import pytest
import tinker
from support.client.sdk import adam, next_token_datum
from tinker import types

from .conftest import MODEL

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
PROMPT = types.ModelInput.from_ints(TOKENS[:4])
LOW_STOPS = list(range(0, 512, 2))


def params(**options: object) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 8, "seed": 7, **options})  # type: ignore[arg-type]


@pytest.fixture
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model that has learned to say TOKENS."""
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


def test_a_sampling_client_keeps_its_weights_while_training_goes_on(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(PROMPT).result()
    trained.forward_backward([next_token_datum(TOKENS[::-1])], "cross_entropy")
    trained.optim_step(adam()).result()
    newer = trained.save_weights_and_get_sampling_client().result()
    assert sampler.compute_logprobs(PROMPT).result() == before
    assert newer.compute_logprobs(PROMPT).result() != before


def test_trap_3_every_sample_has_its_sequences_and_one_logprob_per_token(base: tinker.SamplingClient) -> None:
    sequences = base.sample(PROMPT, 3, params()).result().sequences
    assert [len(sequence.tokens) for sequence in sequences] == [8, 8, 8]
    assert [len(sequence.logprobs or []) for sequence in sequences] == [8, 8, 8]
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 3, "samples of one request differ"


def test_the_same_seed_draws_the_same_samples(base: tinker.SamplingClient) -> None:
    first, second = (base.sample(PROMPT, 2, params()).result().sequences for _ in range(2))
    assert [sequence.tokens for sequence in first] == [sequence.tokens for sequence in second]


def test_stop_ids_end_a_sample_and_stay_in_it(base: tinker.SamplingClient) -> None:
    sequence = base.sample(PROMPT, 1, params(stop=LOW_STOPS, max_tokens=64)).result().sequences[0]
    assert sequence.stop_reason == "stop"
    assert [token in LOW_STOPS for token in sequence.tokens] == [False] * (len(sequence.tokens) - 1) + [True]


def test_stop_strings_end_a_sample_and_stay_in_it(client: tinker.ServiceClient, base: tinker.SamplingClient) -> None:
    greedy = base.sample(PROMPT, 1, params(temperature=0, max_tokens=24, stop=[])).result().sequences[0]
    tokenizer = load_tokenizer()
    text = tokenizer.decode(greedy.tokens[:6])
    stopped = base.sample(PROMPT, 1, params(temperature=0, max_tokens=24, stop=[text[-2:]])).result().sequences[0]
    assert stopped.stop_reason == "stop"
    assert text[-2:] in tokenizer.decode(stopped.tokens)
    assert stopped.tokens == greedy.tokens[: len(stopped.tokens)]


def load_tokenizer() -> object:
    from tinsmith_trainer.torch_model.tiny_model import _make_tokenizer

    return _make_tokenizer("qwen3", 512)


def test_an_empty_stop_list_stops_at_nothing(base: tinker.SamplingClient) -> None:
    sequence = base.sample(PROMPT, 1, params(stop=[], max_tokens=400, temperature=2.0)).result().sequences[0]
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 400)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0}], ids=["top-k", "top-p", "zero"])
def test_narrow_draws_are_greedy(base: tinker.SamplingClient, options: dict[str, float]) -> None:
    greedy, narrow = (
        base.sample(PROMPT, 1, params(**given)).result().sequences[0] for given in ({"temperature": 0}, options)
    )
    assert narrow.tokens == greedy.tokens
    assert narrow.logprobs == greedy.logprobs, "logprobs are those at temperature 1, before top-k and top-p"


def test_prompt_logprobs_come_with_a_sample(base: tinker.SamplingClient) -> None:
    response = base.sample(PROMPT, 1, params(), include_prompt_logprobs=True).result()
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == base.compute_logprobs(PROMPT).result()[1:]


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([5, 99999], {}, "99999"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5] * 5000, {}, "5000"),
    ],
    ids=["token", "temperature", "top-p", "too-long"],
)
def test_a_sample_that_cannot_be_fails_in_words(
    base: tinker.SamplingClient, prompt: list[int], options: dict[str, float], words: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=words) as failure:
        base.sample(types.ModelInput.from_ints(prompt), 1, params(**options)).result()
    assert failure.value.category == "user"


def test_trap_21_four_hundred_samples_at_once_all_arrive(base: tinker.SamplingClient) -> None:
    futures = [base.sample(PROMPT, 1, params(max_tokens=2, seed=index)) for index in range(400)]
    assert all(len(future.result().sequences[0].tokens) == 2 for future in futures)


def test_logprobs_of_samples_are_finite_and_negative(base: tinker.SamplingClient) -> None:
    logprobs = base.sample(PROMPT, 1, params()).result().sequences[0].logprobs or []
    assert all(math.isfinite(value) and value <= 0 for value in logprobs)
