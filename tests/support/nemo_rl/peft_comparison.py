"""A comparison of an engine with the PEFT engine: two adapters, the same calls and steps, and the differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from support.engine.contract import CROSS_ENTROPY, IMPORTANCE_SAMPLING, forward_backward, spec
from support.engine.datums import policy_datum, sft_datum
from tinsmith_trainer.engines.base import AdamParams, Datum, Engine, LossSpec

STEPS = 3
ADAPTERS = {"a": 3, "b": 8}
"""Their ranks: one that tensor ranks do not share evenly, and the highest."""
CALLS: tuple[tuple[Sequence[Datum], LossSpec], ...] = (
    ([sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))], CROSS_ENTROPY),
    ([policy_datum(length, seed) for seed, length in enumerate((7, 19))], IMPORTANCE_SAMPLING),
    ([sft_datum(length, seed, targets=3) for seed, length in enumerate((6, 9))], CROSS_ENTROPY),
)

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Apart:
    """The largest absolute differences: of a logprob, and of a weight of an adapter after the last step.

    `norm` is relative: the gradient's, before it is clipped.
    """

    logprob: float
    norm: float
    weight: float

    def within(self, other: Apart) -> bool:
        return self.logprob <= other.logprob and self.norm <= other.norm and self.weight <= other.weight

    def __str__(self) -> str:
        return f"{self.logprob:.1e} / {self.norm:.1e} / {self.weight:.1e}"


def trained_apart(engine: Engine, peft: Engine) -> Apart:
    """Return the largest difference after `STEPS` steps of either adapter in turn, each of all calls and clipped.

    The engines have no adapters before.
    """
    for each in (engine, peft):
        for adapter, rank in ADAPTERS.items():
            each.create_adapter(adapter, spec(each, rank=rank))
    logprob, norm = 0.0, 0.0
    for step in range(STEPS):
        for adapter in ADAPTERS:
            (logprobs, engine_norm), (peft_logprobs, peft_norm) = (
                _stepped(each, adapter, learning_rate=1e-3 * (step + 1)) for each in (engine, peft)
            )
            logprob = max(logprob, _apart(logprobs, peft_logprobs))
            norm = max(norm, abs(engine_norm - peft_norm) / peft_norm)
    return Apart(logprob, norm, max(_weights_apart(engine, peft, adapter) for adapter in ADAPTERS))


def _stepped(engine: Engine, adapter: str, learning_rate: float) -> tuple[Values, float]:
    """All logprobs of its calls, and the gradient's norm. `eps` keeps what is nearly nothing from steps of `lr`."""
    outcomes = [forward_backward(engine, datums, adapter=adapter, loss=loss) for datums, loss in CALLS]
    logprobs = [output["logprobs"].ravel() for outcome in outcomes for output in outcome.outputs]
    told = engine.optim_step(adapter, AdamParams(learning_rate=learning_rate, eps=1e-3, grad_clip_norm=0.5))
    return np.concatenate(logprobs), told["grad_norm"]


def _weights_apart(engine: Engine, peft: Engine, adapter: str) -> float:
    weights, reference = (each.weights(adapter).tensors for each in (engine, peft))
    assert weights.keys() == reference.keys()
    return max(_apart(weights[name], values) for name, values in reference.items())


def _apart(values: Values, reference: Values) -> float:
    return float(np.abs(values - reference).max())
