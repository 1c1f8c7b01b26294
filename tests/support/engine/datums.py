"""Builders of training examples: random, and the same for the same arguments."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from tinsmith_trainer.engines.base import Datum

# Every engine under test has at least these ids.
VOCAB_SIZE = 32


def sft_datum(length: int, seed: int = 0, *, targets: int | None = None, weights: ArrayLike | None = None) -> Datum:
    """Return a datum for cross_entropy. `targets` is K for several targets per position. Weights are 1 by default."""
    draw = np.random.default_rng([seed, length])
    shape = (length,) if targets is None else (length, targets)
    return Datum(
        tokens=draw.integers(0, VOCAB_SIZE, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": draw.integers(0, VOCAB_SIZE, shape),
            "weights": np.broadcast_to(np.asarray(1.0 if weights is None else weights, np.float32), shape),
        },
    )


def policy_datum(length: int, seed: int = 0, **inputs: ArrayLike) -> Datum:
    """Return a datum for the policy losses, with advantages around 0 and sampler logprobs of a random model."""
    draw = np.random.default_rng([seed, length])
    loss_inputs = {
        "target_tokens": draw.integers(0, VOCAB_SIZE, length),
        "logprobs": draw.normal(-6.0, 0.3, length).astype(np.float32),
        "advantages": draw.normal(0.0, 1.0, length).astype(np.float32),
    }
    given = {name: np.broadcast_to(np.asarray(values, np.float32), (length,)) for name, values in inputs.items()}
    return Datum(draw.integers(0, VOCAB_SIZE, length, dtype=np.int32), loss_inputs | given)


def with_inputs(datum: Datum, **inputs: ArrayLike) -> Datum:
    """Return the datum with some loss inputs replaced."""
    return Datum(datum.tokens, {**datum.loss_inputs, **{name: np.asarray(v) for name, v in inputs.items()}})


def without_input(datum: Datum, name: str) -> Datum:
    return Datum(datum.tokens, {key: values for key, values in datum.loss_inputs.items() if key != name})
