"""A training example as the engines see it, already checked and densified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Datum:
    """Input tokens and the loss's per-token inputs.

    `tokens` is int32 `[T]`. Every loss input is dense: `target_tokens` int64 `[T]` or `[T, K]`,
    all others float32 of the same shape as `target_tokens` or `[T]`.
    """

    tokens: NDArray[np.int32]
    loss_inputs: Mapping[str, NDArray[np.int64] | NDArray[np.float32]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.tokens)
