"""Whether the rows of a forward keep to themselves, to the last bit, whoever is in it.

Products do (products.py). What is left are the layers that LoRA does not cover, and activations. A router and its
experts compute all tokens of a forward together, and a projection that is not wrapped is one product of all rows: such
a model's forwards are of one call alone. Activations are wrapped: beyond two threads PyTorch cuts the elements of all
rows into as many parts as there are threads, and where a part ends without filling a vector it takes scalar code,
whose sigmoid, exp and tanh differ in the last bit (measured with 3, 4 and 8 threads).
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.torch_model.lora import StackedLoraLinear, is_routed_apart

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
THREADS_WITHOUT_TAILS = 2
"""Halves of rows of whole vectors are whole vectors."""


class RowByRow(nn.Module):
    """An activation of x `[rows, ...]`, each row by itself where that matters."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    @override
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1 or torch.get_num_threads() <= THREADS_WITHOUT_TAILS or not is_routed_apart():
            whole: Tensor = self.activation(x)
            return whole
        return torch.cat([self.activation(row) for row in torch.split(x, 1)])


def wrap_activations(model: nn.Module) -> None:
    """Of a model on the CPU: elsewhere kernels have no such tails, and rows would be launched one by one."""
    found = [(name, module) for name, module in model.named_modules() if _is_activation(module)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, RowByRow(module))


def keeps_rows_apart(decoder: nn.Module, config: object) -> bool:
    """Whether all that has parameters works on each token or row by itself: norms, embeddings and wrapped layers."""
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return False
    wrapped = {id(module.base) for module in decoder.modules() if isinstance(module, StackedLoraLinear)}
    return all(_is_apart(module, wrapped) for module in decoder.modules())


def _is_apart(module: nn.Module, wrapped: Container[int]) -> bool:
    has_own = next(module.parameters(recurse=False), None) is not None
    is_known = isinstance(module, nn.Embedding) or "Norm" in type(module).__name__ or id(module) in wrapped
    return is_known or not has_own


def _is_activation(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return type(module).__module__ in ACTIVATIONS and not has_parameters
