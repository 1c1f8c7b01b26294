"""What an architecture does to its logits between the output projection and softmax: a factor, and a soft cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping",)
"""What configurations of transformers call them."""
MULTIPLIED_DESPITE_THE_NAME = ("hyperclovax",)
"""Model types whose `logits_scaling` is a factor; Granite's, of which they took the name, is a divisor."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """`z` becomes `scale * z`, and that becomes `cap * tanh(scale * z / cap)` where there is a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Of the same shape and dtype; `logits` themselves where there is nothing to do, and never changed."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


def logit_transform_of(config: Any) -> LogitTransform:
    """As a configuration of transformers says. Whether that is all a model does, `check_architecture` finds out."""
    text = config.get_text_config()
    divides = text.model_type not in MULTIPLIED_DESPITE_THE_NAME
    scale = _product(text, FACTORS) * (_product(text, DIVISORS) ** (-1 if divides else 1))
    cap = next((float(value) for name in CAPS if (value := getattr(text, name, None))), None)
    return LogitTransform(scale, cap)


def _product(config: Any, names: tuple[str, ...]) -> float:
    product = 1.0
    for name in names:
        value = getattr(config, name, None)
        product *= 1.0 if value is None else float(value)
    return product
