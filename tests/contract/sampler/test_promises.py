"""The promises of every sampler about a job: lengths, stops, seeds, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.sampler.jobs import ask, ask_all, full_logprobs, job, plain_model, prompt_of, submit
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import EMPTY_LOGPROB, SampleJob, Sampler
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import EVERY_TOKEN_SERVER, IN_ANOTHER_PROCESS, IN_PLACE_OF_A_GPU

PROMPT = prompt_of(20)
CONTEXT = 1024
TOLERANCE = 1e-4


pytestmark = pytest.mark.parametrize(
    "sampler",
    # The process computes as the deterministic one.
    ["builtin-fast", *IN_PLACE_OF_A_GPU, IN_ANOTHER_PROCESS, *EVERY_TOKEN_SERVER],
    indirect=True,
)


def greedy_tokens(sampler: Sampler, length: int = 30) -> list[int]:
    """Return the model's greedy answer to `PROMPT`, to choose stops from."""
    return ask(sampler, job(PROMPT, max_tokens=length, temperature=0.0)).sequences[0].tokens.tolist()


# --- lengths ---


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_max_tokens_is_the_length_when_nothing_stops(sampler: Sampler, max_tokens: int) -> None:
    sequence = ask(sampler, job(PROMPT, max_tokens=max_tokens)).sequences[0]
    assert (len(sequence.tokens), len(sequence.logprobs), sequence.stopped) == (max_tokens, max_tokens, False)


@pytest.mark.parametrize("max_tokens", [None, 5000], ids=["unset", "beyond the context"])
def test_a_sequence_ends_with_the_context(sampler: Sampler, max_tokens: int | None) -> None:
    sequence = ask(sampler, job(prompt_of(CONTEXT - 10), max_tokens=max_tokens)).sequences[0]
    assert (len(sequence.tokens), sequence.stopped) == (10, False)


def test_prompt_logprobs_come_without_a_sequence_too(sampler: Sampler) -> None:
    outcome = ask(sampler, job(PROMPT, max_tokens=0, prompt_logprobs=True))
    assert len(outcome.sequences[0].tokens) == 0
    assert np.isfinite(outcome.prompt_logprobs[1:]).all()


@pytest.mark.parametrize(("max_tokens", "last_n"), [(0, None), (1, 1), (1, 40)])
def test_a_prompt_that_fills_the_context_is_scored(
    sampler: Sampler, model: TorchModel, max_tokens: int, last_n: int | None
) -> None:
    prompt = prompt_of(CONTEXT)
    asked = job(prompt, max_tokens=max_tokens, num_samples=2, prompt_logprobs=True, last_n=last_n, topk_prompt=2)
    outcome = ask(sampler, asked)
    assert [(len(sequence.tokens), sequence.stopped) for sequence in outcome.sequences] == [(0, False)] * 2
    first = 1 if last_n is None else CONTEXT - last_n
    expected = full_logprobs(plain_model(model), prompt)[first - 1 :]
    assert np.isnan(outcome.prompt_logprobs[:first]).all()
    np.testing.assert_allclose(outcome.prompt_logprobs[first:], expected, atol=TOLERANCE)
    top = outcome.topk_prompt_logprobs
    assert (top.token_ids.shape, top.logprobs[:first].max()) == ((CONTEXT, 2), EMPTY_LOGPROB)
    assert (top.logprobs[first:, 0] >= outcome.prompt_logprobs[first:] - TOLERANCE).all()


# --- stops ---


def test_a_stop_id_ends_the_sequence_and_stays_in_it(sampler: Sampler) -> None:
    said = greedy_tokens(sampler)
    stop = said[12]
    sequence = ask(sampler, job(PROMPT, max_tokens=30, temperature=0.0, stop_tokens=(stop,))).sequences[0]
    assert sequence.tokens.tolist() == said[: said.index(stop) + 1]
    assert sequence.stopped


def test_a_stop_string_ends_the_sequence_and_its_tokens_stay(sampler: Sampler, model: TorchModel) -> None:
    asked = job(PROMPT, max_tokens=200, temperature=1.0, seed=3)
    text = model.tokenizer.decode(ask(sampler, asked).sequences[0].tokens, clean_up_tokenization_spaces=False)
    stop = next(text[i : i + 2] for i in range(20, len(text)) if "\ufffd" not in text[i : i + 2])
    params = replace(asked.params, stop_tokens=None, stop_strings=("never said", stop))
    sequence = ask(sampler, replace(asked, params=params)).sequences[0]
    decoded = model.tokenizer.decode(sequence.tokens, clean_up_tokenization_spaces=False)
    shorter = model.tokenizer.decode(sequence.tokens[:-1], clean_up_tokenization_spaces=False)
    assert sequence.stopped
    assert stop in decoded
    assert stop not in shorter


def test_a_stop_string_of_the_prompt_ends_nothing_also_where_the_prompt_ends_within_a_character(
    sampler: Sampler, model: TorchModel
) -> None:
    """vLLM would read such a prompt as a part of what it draws."""
    [start] = model.tokenizer.encode("\u20ac", add_special_tokens=False)[:1]
    prompt = [*model.tokenizer.encode("Quartz", add_special_tokens=False), start]
    asked = job(prompt, max_tokens=5, temperature=0.0, stop_tokens=None, stop_strings=("Q",))
    sequence = ask(sampler, asked).sequences[0]
    assert "Q" not in model.tokenizer.decode(sequence.tokens)
    assert (len(sequence.tokens), sequence.stopped) == (5, False)


def test_unset_stops_mean_the_end_of_sequence_tokens(sampler: Sampler, model: TorchModel) -> None:
    unset = job(PROMPT, max_tokens=900, temperature=2.0, stop_tokens=None)
    sequences = [s for outcome in ask_all(sampler, [unset] * 2) for s in outcome.sequences]
    for sequence in sequences:
        assert sequence.stopped
        assert sequence.tokens[-1] in model.eos_token_ids
        assert not set(sequence.tokens[:-1]) & set(model.eos_token_ids)


def test_end_of_sequence_tokens_stop_in_addition_to_strings(sampler: Sampler, model: TorchModel) -> None:
    """Renderers of base models stop at the next speaker's name, and read an end of sequence as an end, too."""
    asked = job(PROMPT, max_tokens=900, temperature=2.0, stop_tokens=(), stop_strings=("\n\nNobody says this:",))
    sequence = ask(sampler, asked).sequences[0]
    assert sequence.stopped
    assert sequence.tokens[-1] in model.eos_token_ids
    assert not set(sequence.tokens[:-1]) & set(model.eos_token_ids)


@pytest.mark.parametrize("empty", ["stop_tokens", "stop_strings"])
def test_an_empty_stop_list_lets_nothing_stop(sampler: Sampler, model: TorchModel, empty: str) -> None:
    """Eight short sequences draw an end as surely as a long one, and a batch draws them together.

    The seed is one with which all samplers draw an end. Without it, they draw none in one of seven runs.
    """
    drawn = {"num_samples": 8, "max_tokens": 120, "temperature": 2.0, "seed": 2}
    sequences = ask(sampler, job(PROMPT, **drawn, **({"stop_tokens": None} | {empty: ()}))).sequences
    assert any(set(sequence.tokens) & set(model.eos_token_ids) for sequence in sequences)
    assert [(len(sequence.tokens), sequence.stopped) for sequence in sequences] == [(120, False)] * 8


# --- seeds ---


def test_a_seed_repeats_its_samples(sampler: Sampler) -> None:
    asked = job(PROMPT, num_samples=3, seed=5)
    first, second = ask(sampler, asked), ask(sampler, asked)
    assert [s.tokens.tolist() for s in first.sequences] == [s.tokens.tolist() for s in second.sequences]


def test_greedy_ignores_the_seed(sampler: Sampler) -> None:
    outcomes = ask_all(sampler, [job(PROMPT, seed=seed, temperature=0.0, num_samples=2) for seed in (None, 1)])
    assert len({tuple(s.tokens) for outcome in outcomes for s in outcome.sequences}) == 1


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-30}], ids=lambda n: next(iter(n)))
def test_the_narrowest_draw_is_greedy(sampler: Sampler, narrow: dict[str, float]) -> None:
    assert ask(sampler, job(PROMPT, max_tokens=30, **narrow)).sequences[0].tokens.tolist() == greedy_tokens(sampler)


# --- bad jobs ---


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (job([]), "The prompt is empty"),
        (job([1, 512]), "token 512; the model's vocabulary is 0 to 511"),
        (job([-1, 5]), "token -1"),
        (job(prompt_of(CONTEXT)), "1024 tokens and leaves no room"),
        (job(PROMPT, temperature=-0.1), "temperature is -0.1"),
        (job(PROMPT, temperature=float("nan")), "temperature is nan"),
        (job(PROMPT, temperature=float("inf")), "temperature is inf"),
        (job(PROMPT, top_k=0), "top_k is 0"),
        (job(PROMPT, top_k=-2), "top_k is -2"),
        (job(PROMPT, top_p=0.0), "top_p is 0.0"),
        (job(PROMPT, top_p=1.01), "top_p is 1.01"),
        (job(PROMPT, top_p=float("nan")), "top_p is nan"),
        (job(PROMPT, num_samples=0), "num_samples is 0"),
        (job(PROMPT, num_samples=10**9), "num_samples is 1000000000; it must be 1 to 4096"),
        (job(PROMPT, max_tokens=-1), "max_tokens is -1"),
        (job(PROMPT, stop_tokens=None, stop_strings=("",)), "A stop string is empty"),
        (job(PROMPT, stop_tokens=(3, 512)), "stop has token 512, which the model never draws"),
        (job(PROMPT, prompt_logprobs=True, last_n=-1), "prompt_logprobs_last_n is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_job_gets_one_clear_user_error(sampler: Sampler, bad: SampleJob, sentence: str) -> None:
    answer = submit(sampler, bad)
    outcome = answer.get()
    assert isinstance(outcome.error, UserError)
    assert sentence in str(outcome.error)
    assert (outcome.sequences, len(answer.outcomes)) == ((), 1)
    ask(sampler, job(PROMPT))
