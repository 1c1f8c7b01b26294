"""A mixture's experts, of which transformers keeps each projection as one weight for all of a layer.

Tinker calls them `w1` (gate, or the only one that leads in), `w3` (up) and `w2` (down); in the model gate and up are
one weight of twice the width, one behind the other or by turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

GATE, UP, DOWN = "w1", "w3", "w2"


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Each layer's, by name, where they are in the form that transformers' table of functions takes."""
    return {name: module for name, module in model.named_modules() if _is_experts(module)}


def is_by_turns(module: Any) -> bool:
    return not getattr(module, "is_concatenated", True)


def shapes_of(module: Any) -> dict[str, tuple[int, int, int]]:
    """Experts, d_out and d_in of each projection, by Tinker's names."""
    experts, hidden, inner = _by_output(module, module.down_proj).shape
    ups = (GATE, UP) if module.has_gate else (GATE,)
    return {**dict.fromkeys(ups, (experts, inner, hidden)), DOWN: (experts, hidden, inner)}


def add_to_experts(module: Any, deltas: Mapping[str, Tensor]) -> None:
    """In place: one of each projection, `[experts, d_out, d_in]`."""
    if module.has_gate:
        _add(module, "gate_up_proj", _joined(deltas[GATE], deltas[UP], by_turns=is_by_turns(module)))
    else:
        _add(module, "up_proj", deltas[GATE])
    _add(module, "down_proj", deltas[DOWN])


def _is_experts(module: nn.Module) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    has_up = "gate_up_proj" in weights or "up_proj" in weights
    return hasattr(module, "is_transposed") and has_up and "down_proj" in weights


def _by_output(module: Any, weight: Tensor) -> Tensor:
    return weight.mT if module.is_transposed else weight


def _add(module: Any, name: str, delta: Tensor) -> None:
    weight = getattr(module, name).data
    weight.copy_(weight.float() + _by_output(module, delta))


def _joined(gate: Tensor, up: Tensor, *, by_turns: bool) -> Tensor:
    """Along d_out."""
    return torch.stack([gate, up], 2).flatten(1, 2) if by_turns else torch.cat([gate, up], 1)
