"""The plan that all engines run: an adapter, and steps of two calls each.

A step has data, losses and Adam's parameters.

Every loss occurs. Datums have various lengths. For most numbers of ranks, the number of datums is not a multiple of the
number of ranks. In some calls, the targets are the next tokens. In other calls, the targets are arbitrary, or each
position has several targets. Learning rate, betas, decay and clipping are different in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import AdamParams, Datum, LoraSpec, LossSpec

TARGETS = "target_tokens"
CROSS_ENTROPY = "cross_entropy"
CALLS = (
    ((CROSS_ENTROPY, 5), ("importance_sampling", 3)),
    (("ppo", 4), ("cispo", 3)),
    (("gspo", 3), ("dro", 4)),
)
LONGEST_DATUM = 48
ALPHA = 32.0

# Eps is far above the rounding of a gradient. With a smaller eps, Adam makes a full step of noise, which depends on the
# processor. An engine that ignores eps is still detected.
ADAM = (
    AdamParams(learning_rate=1e-3, eps=1e-3),
    AdamParams(learning_rate=5e-4, beta1=0.8, beta2=0.99, eps=3e-4, weight_decay=0.1, grad_clip_norm=1.0),
    AdamParams(learning_rate=2e-3, beta2=0.999, eps=2e-3, weight_decay=0.01),
    AdamParams(learning_rate=1.5e-3, beta1=0.0, eps=5e-4, grad_clip_norm=0.1),
)


@dataclass(frozen=True, slots=True)
class ParityCall:
    loss: LossSpec
    datums: Sequence[Datum]


@dataclass(frozen=True, slots=True)
class ParityStep:
    """Several forward_backward calls, whose gradients are added, and the optimizer step after these calls."""

    calls: Sequence[ParityCall]
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class ParityPlan:
    lora: LoraSpec
    steps: Sequence[ParityStep]


def plan_steps(*, steps: int, rank: int, seed: int, vocab_size: int, max_length: int) -> ParityPlan:
    """Return the plan. Equal arguments give the same plan.

    Sampler logprobs are only noise until `with_noise_around` adds logprobs of the base model.
    """
    draw = np.random.default_rng(seed)
    longest = min(LONGEST_DATUM, max_length)
    return ParityPlan(
        LoraSpec(rank, ALPHA, seed),
        [
            ParityStep(
                [
                    ParityCall(LossSpec(loss), _datums(draw, step, loss, count, vocab_size, longest))
                    for loss, count in CALLS[step % len(CALLS)]
                ],
                ADAM[step % len(ADAM)],
            )
            for step in range(steps)
        ],
    )


def _datums(
    draw: np.random.Generator, step: int, loss: str, count: int, vocab_size: int, longest: int
) -> Sequence[Datum]:
    """Return datums.

    In every second round of steps, cross-entropy has arbitrary targets, with two targets per position in the first
    datum.
    """
    arbitrary = loss == CROSS_ENTROPY and (step // len(CALLS)) % 2 == 0
    datums = []
    for index in range(count):
        length = int(draw.integers(1, longest + 1))
        tokens = draw.integers(0, vocab_size, length + 1)
        targets = draw.integers(0, vocab_size, (length, 2) if index == 0 else length) if arbitrary else tokens[1:]
        datums.append(Datum(tokens[:-1].astype(np.int32), {TARGETS: targets, **_inputs(draw, loss, targets.shape)}))
    return datums


def _inputs(draw: np.random.Generator, loss: str, shape: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
    if loss == CROSS_ENTROPY:
        return {"weights": draw.normal(0.5, 1.0, shape).astype(np.float32)}
    return {
        "advantages": (draw.normal(0.0, 1.0, shape) * (draw.random(shape) > 0.2)).astype(np.float32),
        "logprobs": draw.normal(0.0, 0.2, shape).astype(np.float32),
    }


def with_noise_around(call: ParityCall, logprobs: Sequence[NDArray[np.float32]]) -> ParityCall:
    """Return the call with new sampler logprobs: noise around the base model's logprobs of each datum."""
    if call.loss.name == CROSS_ENTROPY:
        return call
    datums = [
        Datum(datum.tokens, {**datum.loss_inputs, "logprobs": (datum.loss_inputs["logprobs"] + own).astype(np.float32)})
        for datum, own in zip(call.datums, logprobs, strict=True)
    ]
    return replace(call, datums=datums)
