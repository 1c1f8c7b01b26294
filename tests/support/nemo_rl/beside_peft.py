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


def trained_apart(ours: Engine, peft: Engine) -> Apart:
    """Return the largest difference after `STEPS` steps of either adapter in turn, each of all calls and clipped.

    The engines have no adapters before.
    """
    for engine in (ours, peft):
        for adapter, rank in ADAPTERS.items():
            engine.create_adapter(adapter, spec(engine, rank=rank))
    logprob, norm = 0.0, 0.0
    for step in range(STEPS):
        for adapter in ADAPTERS:
            (our_logprobs, our_norm), (theirs, their_norm) = (
                _stepped(engine, adapter, learning_rate=1e-3 * (step + 1)) for engine in (ours, peft)
            )
            logprob = max(logprob, _apart(our_logprobs, theirs))
            norm = max(norm, abs(our_norm - their_norm) / their_norm)
    return Apart(logprob, norm, max(_weights_apart(ours, peft, adapter) for adapter in ADAPTERS))


def _stepped(engine: Engine, adapter: str, learning_rate: float) -> tuple[Values, float]:
    """All logprobs of its calls, and the gradient's norm. `eps` keeps what is nearly nothing from steps of `lr`."""
    outcomes = [forward_backward(engine, datums, adapter=adapter, loss=loss) for datums, loss in CALLS]
    logprobs = [output["logprobs"].ravel() for outcome in outcomes for output in outcome.outputs]
    told = engine.optim_step(adapter, AdamParams(learning_rate=learning_rate, eps=1e-3, grad_clip_norm=0.5))
    return np.concatenate(logprobs), told["grad_norm"]


def _weights_apart(ours: Engine, peft: Engine, adapter: str) -> float:
    mine, theirs = (engine.weights(adapter).tensors for engine in (ours, peft))
    assert mine.keys() == theirs.keys()
    return max(_apart(mine[name], values) for name, values in theirs.items())


def _apart(ours: Values, theirs: Values) -> float:
    return float(np.abs(ours - theirs).max())
