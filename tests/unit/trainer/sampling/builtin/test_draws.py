from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinsmith_trainer.sampling.builtin.draws import (
    Draw,
    all_logprobs,
    alternative_uniforms,
    draw_alternatives,
    draw_tokens,
    keep_likely,
    uniform,
)

LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.3, 1.7])
DRAWS = 20_000

weights = hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(0, 20).map(float)).filter(
    lambda w: w.sum() > 0
)


def drawn(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    tokens, logprobs = draw_tokens(logits, draws)
    return tokens.tolist(), logprobs.tolist()


def frequencies(draw: Draw, count: int = DRAWS) -> np.ndarray:
    """Shares of each token over draws with the stream of one seed."""
    rows = [Draw(draw.temperature, draw.top_k, draw.top_p, uniform(11, 0, position)) for position in range(count)]
    tokens, _ = drawn(LOGITS.repeat(count, 1), rows)
    return np.bincount(tokens, minlength=len(LOGITS)) / count


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    possible = expected > 0
    assert not found[~possible].any()
    return float(DRAWS * ((found - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (Draw(temperature=1.0), torch.softmax(LOGITS, 0)),
        (Draw(temperature=0.5), torch.softmax(LOGITS / 0.5, 0)),
        (Draw(temperature=3.0), torch.softmax(LOGITS / 3.0, 0)),
        (Draw(temperature=1.0, top_k=2), torch.softmax(LOGITS.masked_fill(LOGITS < 1.5, -math.inf), 0)),
        (Draw(temperature=1.0, top_p=0.8), torch.softmax(LOGITS.masked_fill(LOGITS < 0.9, -math.inf), 0)),
    ],
    ids=["temperature 1", "cold", "hot", "top-k", "top-p"],
)
def test_draws_follow_the_distribution(draw: Draw, expected: torch.Tensor) -> None:
    """Chi-square of at most 5 degrees of freedom; 20.5 is exceeded once in a thousand seeds."""
    assert chi_square(frequencies(draw), expected.numpy()) < 20.5


@given(weights, st.integers(1, 45))
def test_top_k_keeps_the_k_most_likely_and_the_lower_id_of_equals(values: np.ndarray, k: int) -> None:
    kept = keep_likely(torch.from_numpy(values)[None], torch.tensor([k]), torch.tensor([1.0]))[0].numpy()
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))[:k]
    expected = np.where(np.isin(np.arange(len(values)), best), values, 0)
    np.testing.assert_array_equal(kept, expected)


@given(weights, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_most_likely_set_with_that_share(values: np.ndarray, p: float) -> None:
    kept = keep_likely(torch.from_numpy(values)[None], torch.tensor([-1]), torch.tensor([p]))[0].numpy()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    shares = np.cumsum(values[order].astype(np.float64))
    size = int(np.searchsorted(shares, np.float64(np.float32(p)) * shares[-1])) + 1
    expected = np.where(np.isin(np.arange(len(values)), order[:size]), values, 0)
    np.testing.assert_array_equal(kept, expected)


@given(
    hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(-30, 30, width=32)),
    st.floats(0, 1, exclude_max=True),
    st.floats(1e-6, 100),
    st.sampled_from([-1, 1, 3]),
    st.sampled_from([1.0, 0.5]),
)
def test_a_draw_never_picks_an_impossible_token(
    logits: np.ndarray, number: float, temperature: float, top_k: int, top_p: float
) -> None:
    row = torch.from_numpy(np.append(logits, np.float32(-np.inf)))
    (token,), (logprob,) = drawn(row[None], [Draw(temperature, top_k, top_p, number)])
    assert 0 <= token < len(logits)
    assert math.isfinite(logprob)


@pytest.mark.parametrize("vocab_size", [63, 64, 65, 500, 51_200])
def test_a_draw_is_the_id_at_which_the_sum_of_all_before_it_exceeds_the_number(vocab_size: int) -> None:
    """Blocks of ids are added up first, and that changes nothing."""
    rows = torch.randn(50, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    rows[:, 1::3] = -math.inf
    numbers = [uniform(5, row, 0) for row in range(len(rows))]
    cumulative = torch.softmax(rows.double(), -1).cumsum(-1)
    expected = [int((line <= number).sum()) for line, number in zip(cumulative, numbers, strict=True)]
    assert drawn(rows, [Draw(1.0, uniform=number) for number in numbers])[0] == expected


@pytest.mark.parametrize("possible", [0, 63, 64, 127, 128, 300])
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_the_only_possible_id_is_drawn_wherever_it_is(possible: int, number: float) -> None:
    row = torch.full((1, 301), -math.inf)
    row[0, possible] = -3.0
    assert drawn(row, [Draw(1.0, uniform=number)]) == ([possible], [0.0])


def test_the_logprob_of_a_drawn_id_has_the_bits_of_all_logprobs() -> None:
    rows = 20 * torch.randn(8, 700, generator=torch.Generator().manual_seed(1))
    draws = [Draw(temperature, uniform=0.3) for temperature in (0.0, 1.0, 0.5, 40.0) * 2]
    tokens, logprobs = drawn(rows, draws)
    everything = all_logprobs(rows)
    assert logprobs == [everything[row, token].item() for row, token in enumerate(tokens)]
    torch.testing.assert_close(everything, torch.log_softmax(rows, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [7, 512, 1003])
def test_a_row_draws_the_same_with_any_other_rows(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, vocab_size, generator=generator) * 4
    draws = [
        Draw([0.0, 0.7, 1.0][row % 3], [-1, 5][row % 2], [1.0, 0.9][row // 5], uniform(3, row, 0)) for row in range(9)
    ]
    together = drawn(logits, draws)
    alone = [drawn(logits[row : row + 1], draws[row : row + 1]) for row in range(9)]
    assert repr(together) == repr(([tokens[0] for tokens, _ in alone], [logprobs[0] for _, logprobs in alone]))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
def test_logits_that_are_not_finite_show_as_a_nan_logprob_of_their_row_only(poison: float, temperature: float) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 2] = poison
    _, logprobs = drawn(logits, [Draw(temperature, uniform=0.3)] * 2)
    assert math.isnan(logprobs[0])
    assert math.isfinite(logprobs[1])


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 1000), st.integers(0, 10**6))
def test_a_stream_number_is_a_function_of_its_counter(seed: int, sample: int, position: int) -> None:
    number = uniform(seed, sample, position)
    assert 0 <= number < 1
    assert number == uniform(seed, sample, position)
    assert number not in (uniform(seed + 1, sample, position), uniform(seed, sample + 1, position))


def test_the_stream_never_changes() -> None:
    """Seeds in use must keep their samples across releases."""
    numbers = [uniform(0, 0, 0), uniform(1, 2, 3), uniform(-1, 0, 0)]
    assert numbers == [0.6793214721926347, 0.1048096692999908, 0.11514297902826032]
    assert alternative_uniforms(1, 3, 2) == [0.22906868784643408, 0.23586471521201302]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_alternatives_follow_the_distribution_at_their_temperature(temperature: float) -> None:
    numbers = [alternative_uniforms(11, 1, DRAWS)]
    tokens = draw_alternatives(LOGITS[None], temperature, numbers)[0].numpy()
    expected = torch.softmax(LOGITS / temperature, 0).numpy()
    assert chi_square(np.bincount(tokens, minlength=len(LOGITS)) / DRAWS, expected) < 20.5


@given(st.integers(0, 2**64 - 1), st.integers(1, 10**6), st.integers(1, 5))
def test_no_sample_draws_from_the_streams_of_alternatives(seed: int, position: int, k: int) -> None:
    numbers = alternative_uniforms(seed, position, k)
    assert len(set(numbers)) == k
    assert not set(numbers) & {uniform(seed, index, position) for index in range(k)}
    assert alternative_uniforms(seed, position, k + 1)[:k] == numbers
