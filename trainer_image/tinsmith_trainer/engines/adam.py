"""What AdamW takes and refuses, and what a step tells: the same for every engine."""

from __future__ import annotations

import math

from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.errors import UserError

SMALLEST_EPS = 1e-37
LARGEST = 1e9
"""Of what AdamW multiplies: so much of it overflows no float32, whatever the bias corrections."""


def check_adam(params: AdamParams) -> None:
    """Raises UserError for hyperparameters outside the ranges that torch's AdamW is defined for."""
    ranges = {
        "learning_rate": 0 <= params.learning_rate <= LARGEST,
        "beta1": 0 <= params.beta1 < 1,
        "beta2": 0 <= params.beta2 < 1,
        # A fresh adapter's A has a gradient of exactly zero: without eps the first step divides 0 by 0.
        "eps": SMALLEST_EPS <= params.eps <= LARGEST,
        "weight_decay": 0 <= params.weight_decay <= LARGEST,
        "grad_clip_norm": params.grad_clip_norm >= 0,
    }
    allowed = {
        "learning_rate": f"from 0 to {LARGEST:g}",
        "beta1": "from 0 to below 1",
        "beta2": "from 0 to below 1",
        "eps": f"from {SMALLEST_EPS} to {LARGEST:g}",
        "weight_decay": f"from 0 to {LARGEST:g}",
    }
    for name, within in ranges.items():
        value = getattr(params, name)
        if not within or not math.isfinite(value):
            raise UserError(f"optim_step: {name} is {value}; it must be finite and {allowed.get(name, 'at least 0')}.")


def check_norm(norm: float) -> None:
    """Raises UserError unless the gradient's norm is finite. Who calls it drops the gradient in either case."""
    if not math.isfinite(norm):
        raise UserError(
            f"optim_step did nothing: the gradient's norm is {norm}. The gradient was dropped, "
            f"weights and optimizer are as before. Look for extreme advantages, weights or logprobs in the data: a "
            f"sampler_gap:max above 88 in a forward_backward's metrics means that a ratio exp(lp - q) exceeds float32. "
            f"Give tokens whose logprob is a placeholder, such as -9999, an advantage of 0."
        )


def step_metrics(norm: float, params: AdamParams, step: int) -> dict[str, float]:
    """What an optim_step answers; `norm` before clipping, `step` counted with this one."""
    return {"grad_norm": norm, "learning_rate": params.learning_rate, "step": float(step)}
