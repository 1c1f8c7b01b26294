"""LoRA on a mixture's experts in Megatron's layers, in the layout of `torch_model.experts`.

Each expert has an adapter of its own, but for the factor at the model's hidden size, which all experts of a layer
share: A of `w1` (gate) and `w3` (up), B of `w2` (down). A rank holds its experts' own factors, one behind the other,
and all of what is shared. Every token's gradient of an expert comes to the rank that has it, so own factors are summed
over ranks with the same experts alone, and shared ones over all copies of the model, as Megatron does by `allreduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.engines.nemo_rl.megatron.lora import LoraTensor
from tinsmith_trainer.engines.nemo_rl.megatron.weights import Part
from tinsmith_trainer.torch_model.experts import DOWN, GATE, UP, ExpertProjection

EXPERTS = 0
"""The dimension of own factors that ranks share."""


class ExpertsLora(nn.Module):
    """The adapters of a layer's experts on this rank; stands beside them, and each expert's layers reach for theirs."""

    def __init__(self, name: str, sizes: tuple[int, int], experts: int, part: Part, max_rank: int) -> None:
        super().__init__()
        hidden, inner = sizes
        self.scale = 0.0
        self._max_rank = max_rank
        self._projections = {
            GATE: ExpertProjection(f"{name}.{GATE}", experts, hidden, inner, is_down=False),
            UP: ExpertProjection(f"{name}.{UP}", experts, hidden, inner, is_down=False),
            DOWN: ExpertProjection(f"{name}.{DOWN}", experts, inner, hidden, is_down=True),
        }
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for key, projection in self._projections.items():
            shapes = projection.lora_shapes(max_rank)
            for factors, shape, is_own in zip(
                (self.lora_A, self.lora_B), shapes, (projection.is_down, not projection.is_down), strict=True
            ):
                held = (part.width(experts), *shape[1:]) if is_own else shape
                factors[key] = nn.Parameter(torch.zeros(held))
                _mark(factors[key], is_shared=not is_own or part.count == 1)

    def delta(self, key: str, expert: int, x: Tensor) -> Tensor:
        """Of rows `[rows, d_in]` that came to the rank's expert of this number: `[rows, d_out]`."""
        A, B = self.lora_A[key], self.lora_B[key]
        A, B = (A[expert], B[0]) if self._projections[key].is_down else (A[0], B[expert])
        found: Tensor = (x.to(A.dtype) @ A.T * self.scale) @ B.T
        return found

    def tensors(self) -> Iterator[LoraTensor]:
        for key, projection in self._projections.items():
            shape_A, shape_B = projection.lora_shapes(self._max_rank)
            own_A, own_B = (EXPERTS, None) if projection.is_down else (None, EXPERTS)
            yield _tensor(f"{projection.key}.lora_A", self.lora_A[key], own_A, shape_A)
            yield _tensor(f"{projection.key}.lora_B", self.lora_B[key], own_B, shape_B)


class ExpertLinear(nn.Module):
    """One expert's frozen layer with the deltas of its projections, side by side."""

    def __init__(self, base: nn.Module, lora: ExpertsLora, keys: Sequence[str], expert: int) -> None:
        super().__init__()
        self.base = base
        self._lora = (lora,)  # not a part of this module: it is the layer's
        self._keys = tuple(keys)
        self._expert = expert

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.base(x, *args, **kwargs)
        delta = torch.cat([self._lora[0].delta(key, self._expert, x) for key in self._keys], dim=-1)
        return (out + delta).to(out.dtype), bias


def place_experts(
    layer: Any, name: str, sizes: tuple[int, int], experts: int, part: Part, max_rank: int
) -> ExpertsLora:
    """Wraps the layers of Megatron's SequentialMLP of a mixture's layer in place."""
    of_layer = layer.mlp.experts
    lora = ExpertsLora(f"{name}mlp.experts", sizes, experts, part, max_rank)
    of_layer.lora = lora
    for number, expert in enumerate(of_layer.local_experts):
        expert.linear_fc1 = ExpertLinear(expert.linear_fc1, lora, (GATE, UP), number)
        expert.linear_fc2 = ExpertLinear(expert.linear_fc2, lora, (DOWN,), number)
    return lora


def _mark(parameter: nn.Parameter, *, is_shared: bool) -> None:
    marked: Any = parameter
    marked.allreduce = is_shared


def _tensor(name: str, parameter: nn.Parameter, split: int | None, full_shape: tuple[int, ...]) -> LoraTensor:
    return LoraTensor(name, parameter, split, full_shape, "tensor" if split is None else "expert")
