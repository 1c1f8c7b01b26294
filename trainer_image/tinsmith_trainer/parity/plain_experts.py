"""Adapters of experts, added to the weights that transformers' own layers compute with, for autograd to differentiate.

PEFT has none of this form: its adapters of such parameters share nothing between experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.torch_model.experts import DOWN, GATE, UP, ExpertProjection


class _Delta(nn.Module):
    """One projection's: A `[experts or 1, rank, d_in]`, B `[experts or 1, d_out, rank]`."""

    def __init__(self, projection: ExpertProjection, lora: LoraSpec, device: torch.device) -> None:
        super().__init__()
        shape_A, shape_B = projection.lora_shapes(lora.rank)
        self.key = projection.key
        self.lora_A = nn.Parameter(torch.zeros(shape_A, device=device))
        self.lora_B = nn.Parameter(torch.zeros(shape_B, device=device))
        self.scaling = lora.alpha / lora.rank

    def weight(self) -> Tensor:
        """`[experts, d_out, d_in]`."""
        return torch.matmul(self.lora_B, self.lora_A) * self.scaling


class _PlusDeltas(nn.Module):
    """A parametrization of one parameter, which may hold gate and up at once."""

    def __init__(self, deltas: list[_Delta], *, is_concatenated: bool, is_transposed: bool) -> None:
        super().__init__()
        self.deltas = nn.ModuleList(deltas)
        self.is_concatenated = is_concatenated
        self.is_transposed = is_transposed

    @override
    def forward(self, weight: Tensor) -> Tensor:
        parts = [delta.weight() for delta in self.deltas if isinstance(delta, _Delta)]
        lies_behind = self.is_concatenated or len(parts) == 1
        joined = torch.cat(parts, 1) if lies_behind else torch.stack(parts, 2).flatten(1, 2)
        return weight + (joined.mT if self.is_transposed else joined).to(weight.dtype)


def add_to_experts(model: nn.Module, projections: Mapping[str, ExpertProjection], lora: LoraSpec) -> None:
    for name in sorted({key.rpartition(".")[0] for key in projections}):
        module: Any = model.get_submodule(name)
        ups, up = ((GATE, UP), "gate_up_proj") if module.has_gate else ((GATE,), "up_proj")
        for parts, parameter in ((ups, up), ((DOWN,), "down_proj")):
            device = getattr(module, parameter).device
            deltas = [_Delta(projections[f"{name}.{part}"], lora, device) for part in parts]
            added = _PlusDeltas(deltas, is_concatenated=module.is_concatenated, is_transposed=module.is_transposed)
            parametrize.register_parametrization(module, parameter, added)


def trained_by_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names that engines give them."""
    deltas = [module for module in model.modules() if isinstance(module, _Delta)]
    return {
        f"{delta.key}.{part}": parameter
        for delta in deltas
        for part, parameter in delta.named_parameters(recurse=False)
    }
