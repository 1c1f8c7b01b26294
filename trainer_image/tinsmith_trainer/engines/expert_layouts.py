"""Adapters of experts as other programs keep them, from ours: PEFT's, fused as the layers are, and one expert by one.

Ours are Tinker's: `<experts>.w1`, `.w3`, `.w2` of three dimensions, where the factor at the model's hidden size is one
for all experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

GATE, UP, DOWN = "w1", "w3", "w2"
FORMER_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""What PEFT takes for a projection of an expert in the layout of transformers 4, wherever in the model it is."""

Array = NDArray[np.float32]


def peft_targets(modules: Iterable[str], has_experts: bool) -> tuple[list[str], list[str]]:
    """`target_modules` and `target_parameters` of linear layers.

    In a model with experts PEFT would look for all layers of the former names among these: as parameters it leaves
    them where they are (peft.utils.transformers_weight_conversion, 0.21).
    """
    named = list(modules)
    moved = {name for name in named if has_experts and name.rpartition(".")[2] in FORMER_NAMES}
    return [name for name in named if name not in moved], [f"{name}.weight" for name in named if name in moved]


def for_each_expert(shared_or_own: Array, experts: int) -> Array:
    """`[experts or 1, ...]` as `[experts, ...]`."""
    return np.broadcast_to(shared_or_own, (experts, *shared_or_own.shape[1:]))
