"""Alternatives of a model: the likeliest tokens, named ones, and draws, at prompt and sampled positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from support.sampler.jobs import all_logprobs, ask, ask_all, job, plain_model, prompt_of, random_adapter, submit
from support.sampler.pool_replica import PoolReplica, RemoteSampler
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import EMPTY_LOGPROB, EMPTY_TOKEN, NO_TARGET, SampleJob, Sampler, TopkLogprobs
from tinsmith_trainer.sampling.checks import MOST_LOGPROBS, MOST_TOPK
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import IN_ANOTHER_PROCESS, SAMPLERS

TOLERANCE = 1e-4
PROMPT = prompt_of(40)
BLOCK = 16  # of the samplers under test
with_and_without_an_adapter = pytest.mark.parametrize("adapter", ["", "tuned"], ids=["base", "adapter"])


@pytest.fixture(params=[*SAMPLERS, IN_ANOTHER_PROCESS])
def sampler(request: pytest.FixtureRequest, model: TorchModel) -> Iterator[Sampler]:
    """Return the sampler with an adapter `tuned`."""
    if request.param == IN_ANOTHER_PROCESS:
        replica: PoolReplica = request.getfixturevalue("replica")
        sampler: Sampler = RemoteSampler(replica, f"file://{replica.folder / 'checkpoints'}", model.info)
    else:
        sampler = SAMPLERS[request.param](model)
    sampler.load_adapter("tuned", random_adapter(model))
    yield sampler
    sampler.close()


def expected(model: TorchModel, adapter: str, tokens: object) -> np.ndarray:
    """Logprobs of the whole vocabulary, at each position but the first, by plain transformers."""
    return all_logprobs(plain_model(model, random_adapter(model) if adapter else None), tokens)


def assert_likeliest(found: TopkLogprobs, logprobs: np.ndarray) -> None:
    """Compare within the tolerance, because less may decide which of two tokens is likelier."""
    k = found.token_ids.shape[1]
    np.testing.assert_allclose(found.logprobs, -np.sort(-logprobs, axis=1)[:, :k], atol=TOLERANCE)
    np.testing.assert_allclose(np.take_along_axis(logprobs, found.token_ids, axis=1), found.logprobs, atol=TOLERANCE)
    assert all(len(set(row)) == k for row in found.token_ids.tolist())


# --- the likeliest tokens ---


@with_and_without_an_adapter
@pytest.mark.parametrize("k", [1, 7])
def test_the_likeliest_tokens_of_a_prompt_are_those_of_one_full_forward(
    sampler: Sampler, model: TorchModel, adapter: str, k: int
) -> None:
    found = ask(sampler, job(PROMPT, adapter=adapter, max_tokens=1, topk_prompt=k)).topk_prompt_logprobs
    assert found is not None
    assert found.token_ids.shape == found.logprobs.shape == (len(PROMPT), k)
    assert set(found.token_ids[0]) == {EMPTY_TOKEN}
    assert set(found.logprobs[0]) == {EMPTY_LOGPROB}
    assert_likeliest(TopkLogprobs(found.token_ids[1:], found.logprobs[1:]), expected(model, adapter, PROMPT))


@with_and_without_an_adapter
def test_the_likeliest_tokens_of_a_sample_are_those_of_one_full_forward(
    sampler: Sampler, model: TorchModel, adapter: str
) -> None:
    asked = job(PROMPT, adapter=adapter, num_samples=2, temperature=0.5, top_k=20, topk_sample=5)
    for sequence in ask(sampler, asked).sequences:
        assert sequence.topk_logprobs is not None
        logprobs = expected(model, adapter, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :]
        assert_likeliest(sequence.topk_logprobs, logprobs)


def test_each_job_of_a_batch_gets_as_many_as_it_asked_for(sampler: Sampler) -> None:
    outcomes = ask_all(sampler, [job(PROMPT, topk_sample=k) for k in (0, 1, 6, 3)])
    parts = [outcome.sequences[0].topk_logprobs for outcome in outcomes]
    assert parts[0] is None
    assert [part.token_ids.shape for part in parts[1:] if part] == [(8, 1), (8, 6), (8, 3)]
    assert parts[1].token_ids.tolist() == parts[2].token_ids[:, :1].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("last_n", [0, 1, BLOCK, 39, 100])
def test_the_likeliest_tokens_are_searched_only_for_the_last_prompt_tokens(sampler: Sampler, last_n: int) -> None:
    whole, part = (
        ask(sampler, job(PROMPT, max_tokens=1, topk_prompt=2, last_n=last)).topk_prompt_logprobs
        for last in (None, last_n)
    )
    assert whole is not None
    assert part is not None
    first = max(1, len(PROMPT) - last_n)
    assert (part.logprobs[:first] == np.float32(EMPTY_LOGPROB)).all()
    np.testing.assert_allclose(part.logprobs[first:], whole.logprobs[first:], atol=TOLERANCE)


# --- named tokens ---


@with_and_without_an_adapter
def test_named_tokens_get_their_logprobs_and_others_zero(sampler: Sampler, model: TorchModel, adapter: str) -> None:
    draw = np.random.default_rng(3)
    targets = draw.integers(NO_TARGET, 512, (len(PROMPT) - 1, 4))
    targets[:20] = NO_TARGET
    found = ask(sampler, job(PROMPT, adapter=adapter, max_tokens=1, targets=targets)).target_prompt_logprobs
    assert found is not None
    assert found.dtype == np.float32
    logprobs = np.take_along_axis(expected(model, adapter, PROMPT), np.maximum(targets, 0), axis=1)
    np.testing.assert_allclose(found, np.where(targets == NO_TARGET, 0, logprobs), atol=TOLERANCE)
    assert (found[targets == NO_TARGET] == 0).all()


def test_named_tokens_of_the_prompt_itself_are_its_prompt_logprobs(sampler: Sampler) -> None:
    outcome = ask(sampler, job(PROMPT, max_tokens=1, prompt_logprobs=True, targets=PROMPT[1:, None]))
    assert outcome.prompt_logprobs is not None
    assert outcome.target_prompt_logprobs is not None
    assert outcome.target_prompt_logprobs[:, 0].tolist() == outcome.prompt_logprobs[1:].tolist()


# --- draws ---


def test_alternatives_have_the_models_logprobs(sampler: Sampler, model: TorchModel) -> None:
    drawn = ask(sampler, job(PROMPT, max_tokens=1, temperature=2.0, alt_tokens=3)).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == (len(PROMPT) - 1, 3)
    logprobs = np.take_along_axis(expected(model, "", PROMPT), drawn.tokens, axis=1)
    np.testing.assert_allclose(drawn.logprobs, logprobs, atol=TOLERANCE)


def test_alternatives_follow_the_temperature(sampler: Sampler, model: TorchModel) -> None:
    """The mean logprob of 1000 draws from the model's own distribution is its negative entropy, within 5 sigma."""
    for temperature in (0.5, 1.0):
        asked = job(PROMPT[:2], max_tokens=1, temperature=temperature, alt_tokens=1000)
        drawn = ask(sampler, asked).prompt_alt_tokens
        assert drawn is not None
        logprobs = expected(model, "", PROMPT[:2])[0].astype(np.float64)
        shares = np.exp(logprobs / temperature) / np.exp(logprobs / temperature).sum()
        mean = (shares * logprobs).sum()
        deviation = np.sqrt((shares * (logprobs - mean) ** 2).sum() / drawn.tokens.size)
        assert abs(drawn.logprobs.mean() - mean) < 5 * deviation


def test_greedy_alternatives_are_the_likeliest_token_each_time(sampler: Sampler) -> None:
    outcome = ask(sampler, job(PROMPT, max_tokens=1, temperature=0.0, alt_tokens=2, topk_prompt=1))
    assert outcome.prompt_alt_tokens is not None
    assert outcome.topk_prompt_logprobs is not None
    assert outcome.prompt_alt_tokens.tokens.tolist() == outcome.topk_prompt_logprobs.token_ids[1:].repeat(2, 1).tolist()


def test_a_seed_repeats_its_alternatives_with_any_other_options(sampler: Sampler) -> None:
    plain = job(PROMPT, seed=5, alt_tokens=4)
    busy = job(PROMPT, seed=5, alt_tokens=4, num_samples=3, topk_prompt=2, prompt_logprobs=True, last_n=3)
    other = job(PROMPT, seed=6, alt_tokens=4)
    drawn = [outcome.prompt_alt_tokens for outcome in ask_all(sampler, [plain, busy, other])]
    assert drawn[0] is not None
    assert drawn[0].tokens.tolist() == drawn[1].tokens.tolist()  # type: ignore[union-attr]
    assert drawn[0].tokens.tolist() != drawn[2].tokens.tolist()  # type: ignore[union-attr]


def test_alternatives_of_equal_positions_differ_from_each_other(sampler: Sampler) -> None:
    drawn = ask(sampler, job(PROMPT, max_tokens=1, temperature=3.0, alt_tokens=8)).prompt_alt_tokens
    assert drawn is not None
    most = max(Counter(row).most_common(1)[0][1] for row in drawn.tokens.tolist())
    assert most < 8, "the k draws of a position are independent"


# --- prompts that are known, and short ones ---


@pytest.mark.parametrize(
    "asks",
    [{"topk_prompt": 2}, {"targets": PROMPT[1:, None]}, {"alt_tokens": 2}],
    ids=lambda asks: next(iter(asks)),
)
def test_a_prompt_in_the_cache_is_scored_all_the_same(sampler: Sampler, asks: dict[str, object]) -> None:
    asked = job(PROMPT, max_tokens=1, **asks)
    first = ask(sampler, asked)
    ask(sampler, job(PROMPT, max_tokens=1))
    again = ask(sampler, asked)
    assert again.prompt_cache_hit_tokens == 0
    for one, other in zip(_floats(first), _floats(again), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


def test_a_prompt_of_one_token_has_no_position_to_ask_about(sampler: Sampler) -> None:
    outcome = ask(sampler, job([5], max_tokens=0, topk_prompt=2, alt_tokens=3))
    assert outcome.topk_prompt_logprobs is not None
    assert outcome.prompt_alt_tokens is not None
    assert outcome.topk_prompt_logprobs.token_ids.shape == (1, 2)
    assert outcome.prompt_alt_tokens.tokens.shape == (0, 3)


def test_all_can_be_asked_without_a_sequence(sampler: Sampler) -> None:
    asked = job(PROMPT, max_tokens=0, topk_prompt=2, targets=PROMPT[1:, None], alt_tokens=2, topk_sample=2)
    outcome = ask(sampler, asked)
    assert all(np.isfinite(part).all() for part in _floats(outcome))
    assert len(outcome.sequences[0].tokens) == 0


def _floats(outcome: object) -> list[np.ndarray]:
    parts = [outcome.topk_prompt_logprobs, outcome.prompt_alt_tokens]  # type: ignore[attr-defined]
    arrays = [part.logprobs for part in parts if part is not None]
    targets = outcome.target_prompt_logprobs  # type: ignore[attr-defined]
    return arrays if targets is None else [*arrays, targets]


# --- bad jobs ---


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (job(PROMPT, topk_prompt=-1), "topk_prompt_logprobs is -1; it must be 0 to 512"),
        (job(PROMPT, topk_sample=513), "topk_sample_logprobs is 513; it must be 0 to 512"),
        (job(PROMPT, alt_tokens=MOST_TOPK + 1), "prompt_alt_tokens_k is 1025; it must be 0 to 1024"),
        (
            job(PROMPT, topk_sample=400, num_samples=4096, max_tokens=900),
            f"400 logprobs at each of 3686400 positions; the answer has room for {MOST_LOGPROBS // 3_686_400} at",
        ),
        (
            job(PROMPT, topk_sample=20, num_samples=900, max_tokens=931, targets=np.zeros((39, 800))),
            "topk_sample_logprobs asks for 20 logprobs at each of 837900 positions; the answer has room for 19 at",
        ),
        (
            job(PROMPT, targets=np.zeros((3, 2))),
            "target_prompt_logprobs has shape [3, 2]; a prompt of 40 tokens needs [39",
        ),
        (job(PROMPT, targets=np.zeros(39)), "target_prompt_logprobs has shape [39]"),
        (job(PROMPT, targets=np.full((39, 1), 512)), "target_prompt_logprobs names token 512"),
        (job(PROMPT, targets=np.full((39, 1), -2)), "target_prompt_logprobs names token -2"),
        (job(PROMPT, targets=np.full((39, 1), -1)), "target_prompt_logprobs names no token"),
        (job(PROMPT, targets=np.zeros((39, 0))), "target_prompt_logprobs names no token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_that_asks_too_much_gets_one_clear_user_error(sampler: Sampler, bad: SampleJob, sentence: str) -> None:
    outcome = submit(sampler, bad).get()
    assert isinstance(outcome.error, UserError)
    assert sentence in str(outcome.error)
    ask(sampler, job(PROMPT))
