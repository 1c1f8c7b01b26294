"""Losses and gradients where model and sampler differ by more than float32 can exponentiate, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.datums import policy_datum
from tinsmith_trainer.engines.base import Datum, LossSpec
from tinsmith_trainer.engines.losses import VALID, Terms, prepare_loss

Floats = NDArray[np.float64]

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
SMALLEST_ADVANTAGE = 0.125
PLACEHOLDERS = (-95.0, -9999.0, -1e4)
CLIPS = {"ppo": (0.8, 1.2), "gspo": (0.8, 1.2), "cispo": (0.0, 4.0), "stable_reinforce": (0.0, 4.0)}
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro", "stable_reinforce")


class Tokens(NamedTuple):
    """The inputs of a loss: logprobs of model and sampler, advantages (or weights), and gspo's mask."""

    lp: Floats
    q: Floats
    advantages: Floats
    mask: Floats

    @property
    def active(self) -> NDArray[np.bool_]:
        return self.advantages != 0


class Reference(NamedTuple):
    """A loss and its slope; `loss_terms` and `slope_terms` are the sizes of what they are sums of, where they are sums.

    Where terms cancel, float32 keeps 24 bits of the terms and fewer of their sum.
    """

    loss: Floats
    slope: Floats
    loss_terms: Floats | None = None
    slope_terms: Floats | None = None


def exponential(log_ratio: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.exp(log_ratio)


def cross_entropy(tokens: Tokens) -> Reference:
    return Reference(-tokens.advantages * np.where(tokens.active, tokens.lp, 0), -tokens.advantages)


def importance_sampling(tokens: Tokens) -> Reference:
    surrogate = exponential(np.where(tokens.active, tokens.lp - tokens.q, 0)) * tokens.advantages
    return Reference(-surrogate, -surrogate)


def clipped(tokens: Tokens, log_ratio: Floats, low: float, high: float) -> Reference:
    free = exponential(np.where(tokens.active, log_ratio, 0)) * tokens.advantages
    bound = np.where(tokens.advantages > 0, high, low) * tokens.advantages
    return Reference(-np.minimum(free, bound), np.where(free <= bound, -free, 0))


def ppo(tokens: Tokens) -> Reference:
    return clipped(tokens, tokens.lp - tokens.q, *CLIPS["ppo"])


def gspo(tokens: Tokens) -> Reference:
    averaged = tokens.mask != 0
    mean = np.where(averaged, tokens.lp - tokens.q, 0).sum() / max(1, averaged.sum())
    return clipped(tokens, np.full(len(tokens.lp), mean), *CLIPS["gspo"])


def cispo(tokens: Tokens) -> Reference:
    ratio = np.clip(exponential(np.where(tokens.active, tokens.lp - tokens.q, 0)), *CLIPS["cispo"])
    slope = -ratio * tokens.advantages
    return Reference(slope * np.where(tokens.active, tokens.lp, 0), slope)


def dro(tokens: Tokens) -> Reference:
    gap = tokens.lp - tokens.q
    return Reference(
        -(tokens.lp * tokens.advantages - 0.025 * gap**2),
        -(tokens.advantages - 0.05 * gap),
        np.abs(tokens.lp * tokens.advantages) + 0.025 * gap**2,
        np.abs(tokens.advantages) + 0.05 * np.abs(gap),
    )


def stable_reinforce(tokens: Tokens) -> Reference:
    gap = np.where(tokens.active, tokens.lp - tokens.q, 0)
    surrogate = cispo(tokens)
    return Reference(
        surrogate.loss + 0.05 * gap**2,
        surrogate.slope + 0.1 * gap,
        np.abs(surrogate.loss) + 0.05 * gap**2,
        np.abs(surrogate.slope) + 0.1 * np.abs(gap),
    )


REFERENCES: Mapping[str, Callable[[Tokens], Reference]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "dro": dro,
    "stable_reinforce": stable_reinforce,
}
CONFIGS = {"stable_reinforce": {"kl_coeff": 0.1}}


def computed(name: str, tokens: Tokens) -> Reference:
    inputs = {"weights": tokens.advantages}
    if name != "cross_entropy":
        inputs = {"logprobs": tokens.q, "advantages": tokens.advantages}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = tokens.mask
    datum = policy_datum(len(tokens.lp), **inputs)
    own = {key: values for key, values in datum.loss_inputs.items() if key in {"target_tokens", *inputs}}
    terms, slope = evaluated(name, Datum(datum.tokens, own), CONFIGS.get(name, {}), lp=tokens.lp)
    return Reference(terms.loss.detach()[0].double().numpy(), slope[0].double().numpy())


def evaluated(
    name: str, datum: Datum, config: Mapping[str, float] | None = None, *, lp: Floats | float = -1.0
) -> tuple[Terms, torch.Tensor]:
    loss = prepare_loss(LossSpec(name, config or {}), [datum])
    inputs = {key: torch.from_numpy(values.copy())[None] for key, values in loss.arrays[0].items()}
    inputs[VALID] = torch.ones(1, datum.length, dtype=torch.bool)
    logprobs = torch.tensor(np.broadcast_to(lp, datum.length), dtype=torch.float32)[None].requires_grad_()
    terms = loss(logprobs, inputs)
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    return terms, logprobs.grad


def assert_equals_where_float32_can(
    found: Floats, expected: Floats, exponents: Floats, terms: Floats | None = None
) -> None:
    """float32 keeps 24 bits of what is exponentiated, of which `exponents` bounds the size, and of what is added."""
    fits = np.abs(expected) < LARGEST_FLOAT32 * SMALLEST_ADVANTAGE / 2
    assert np.isfinite(found[fits]).all(), (found, expected)
    relative = 1e-6 + 2.0**-22 * exponents[fits]
    error = np.abs(found[fits] - expected[fits])
    size = np.abs(expected if terms is None else terms)[fits]
    assert (error <= relative * size + SMALLEST_NORMAL).all(), (found, expected)


numbers = st.floats(-1e4, 0, width=32)
logprobs = st.one_of(numbers, st.floats(-30, 0, width=32), st.sampled_from(PLACEHOLDERS))
advantages = st.one_of(st.just(0.0), st.sampled_from([-1.0, 1.0]), st.floats(SMALLEST_ADVANTAGE, 8, width=32)).flatmap(
    lambda size: st.sampled_from([size, -size])
)


@st.composite
def drawn_tokens(draw: st.DrawFn) -> Tokens:
    length = draw(st.integers(1, 5))

    def column(values: st.SearchStrategy[float]) -> Floats:
        return np.array(draw(st.lists(values, min_size=length, max_size=length)))

    mask = column(st.sampled_from([0.0, 1.0]))
    return Tokens(column(logprobs), column(logprobs), column(advantages), mask if mask.any() else np.ones(length))


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None)
@given(tokens=drawn_tokens())
def test_loss_and_gradient_are_those_of_float64_wherever_float32_can_hold_them(name: str, tokens: Tokens) -> None:
    expected, found = REFERENCES[name](tokens), computed(name, tokens)
    exponents = np.abs(tokens.lp - tokens.q)
    if name == "gspo":
        exponents = np.full_like(exponents, exponents[tokens.mask != 0].sum())
    assert_equals_where_float32_can(found.loss, expected.loss, exponents, expected.loss_terms)
    assert_equals_where_float32_can(found.slope, expected.slope, exponents, expected.slope_terms)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "stable_reinforce"])
@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_a_placeholder_for_a_samplers_logprob_is_clipped_like_any_large_ratio(name: str, placeholder: float) -> None:
    lp, ones = np.full(3, -2.0), np.ones(3)
    found = computed(name, Tokens(lp, np.full(3, placeholder), ones, ones))
    expected = REFERENCES[name](Tokens(lp, np.full(3, placeholder), ones, ones))
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    np.testing.assert_allclose(found.slope, expected.slope, rtol=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_target_that_the_model_rules_out_has_a_ratio_and_a_gradient_of_zero(name: str, advantage: float) -> None:
    lp, ones = np.array([-math.inf]), np.ones(1)
    found = computed(name, Tokens(lp, np.array([-1.0]), advantage * ones, ones))
    clipped_to = 0.8 if advantage < 0 and name != "importance_sampling" else 0.0
    assert (found.loss.tolist(), found.slope.tolist()) == ([pytest.approx(clipped_to)], [0.0])


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_ratio_beyond_float32_counts_as_clipped(name: str) -> None:
    terms, _ = evaluated(name, policy_datum(2, logprobs=-9999.0, advantages=1.0))
    assert terms.metrics["clipped:sum"].tolist() == [2]
