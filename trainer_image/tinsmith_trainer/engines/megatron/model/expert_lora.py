"""LoRA on the experts of a mixture in Megatron's layers, in the layout of `torch_model.experts`.

Each expert has a separate adapter, except for one factor that all experts of a layer share. The shared factor is the
factor at the model's hidden size: A of `w1` (gate) and `w3` (up), and B of `w2` (down). Each rank holds the
concatenated separate factors of the rank's experts, and all shared factors. All gradients of an expert reach the rank
that holds this expert. So gradients of separate factors are summed only over ranks with the same experts, and gradients
of shared factors over all copies of the model. The attribute `allreduce` of a parameter tells Megatron over which ranks
a gradient is summed. Tensor ranks that share a sequence send different tokens of the sequence to the experts. Gradients
of shared factors are then also summed over the tensor ranks, by the attribute `sequence_parallel`.

Megatron computes experts one by one (`SequentialMLP`), or all experts of a rank in one product (`TEGroupedMLP`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.engines.megatron.model.lora import LoraTensor
from tinsmith_trainer.engines.megatron.model.weights import Part
from tinsmith_trainer.torch_model.expert_products import by_all, by_expert
from tinsmith_trainer.torch_model.experts import DOWN, GATE, UP, ExpertProjection

EXPERTS = 0
"""The dimension in which the separate factors of experts are divided among ranks."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of a layer of experts: the number of experts on all ranks, the input width and the hidden width."""

    experts: int
    hidden: int
    inner: int


class ExpertsLora(nn.Module):
    """The adapters of a layer's experts on this rank, which the wrapped layers use.

    Parameters have the dtype and device of `like`. Parameters belong to this module directly, because Megatron-Bridge
    would treat a container as a module of the model.
    """

    def __init__(self, name: str, sizes: ExpertSizes, part: Part, max_rank: int, like: Tensor) -> None:
        super().__init__()
        self.scale = 0.0
        self._max_rank = max_rank
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.inner
        self._projections = {
            GATE: ExpertProjection(f"{name}.{GATE}", experts, hidden, inner, is_down=False),
            UP: ExpertProjection(f"{name}.{UP}", experts, hidden, inner, is_down=False),
            DOWN: ExpertProjection(f"{name}.{DOWN}", experts, inner, hidden, is_down=True),
        }
        for key, projection in self._projections.items():
            shapes, are_own = projection.lora_shapes(max_rank), (projection.is_down, not projection.is_down)
            for factor, shape, is_own in zip("AB", shapes, are_own, strict=True):
                held = (part.width(experts), *shape[1:]) if is_own else shape
                parameter = nn.Parameter(like.new_zeros(held))
                _mark(parameter, is_shared=not is_own or part.count == 1)
                self.register_parameter(f"{key}_{factor}", parameter)

    def factors(self, key: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Return A `[n, rank, d_in]` and B `[n, d_out, rank]` of a projection.

        For the shared factor, n is 1; for the other factor, n is the number of experts on this rank.
        """
        return self.get_parameter(f"{key}_A"), self.get_parameter(f"{key}_B")

    def delta(self, key: str, expert: int, x: Tensor) -> Tensor:
        """Return the deltas `[rows, d_out]` for rows `[rows, d_in]` of the rank's expert with this index."""
        A, B = self.factors(key)
        own_A, own_B = (A[expert], B[0]) if self._projections[key].is_down else (A[0], B[expert])
        found: Tensor = (x.to(A.dtype) @ own_A.T * self.scale) @ own_B.T
        return found

    def deltas(self, key: str, x: Tensor, counts: Tensor) -> Tensor:
        """Return the deltas for rows of all experts of the rank, sorted by expert. `counts` are the rows per expert."""
        A, B = self.factors(key)
        if self._projections[key].is_down:
            return by_all(by_expert(x, A, counts) * self.scale, B)
        return by_expert(by_all(x, A) * self.scale, B, counts)

    def tensors(self) -> Iterator[LoraTensor]:
        for key, projection in self._projections.items():
            A, B = self.factors(key)
            shape_A, shape_B = projection.lora_shapes(self._max_rank)
            own_A, own_B = (EXPERTS, None) if projection.is_down else (None, EXPERTS)
            yield _tensor(f"{projection.key}.lora_A", A, own_A, shape_A)
            yield _tensor(f"{projection.key}.lora_B", B, own_B, shape_B)


class _WithDeltas(nn.Module):
    """A frozen layer that adds the concatenated deltas of the layer's projections."""

    def __init__(self, base: nn.Module, lora: ExpertsLora, keys: Sequence[str]) -> None:
        super().__init__()
        self.base = base
        self.lora = (lora,)  # a tuple, so that it is not registered as a submodule
        self.keys = tuple(keys)


class ExpertLinear(_WithDeltas):
    """A wrapped layer of one expert."""

    def __init__(self, base: nn.Module, lora: ExpertsLora, keys: Sequence[str], expert: int) -> None:
        super().__init__(base, lora, keys)
        self._expert = expert

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.base(x, *args, **kwargs)
        delta = torch.cat([self.lora[0].delta(key, self._expert, x) for key in self.keys], dim=-1)
        return (out + delta).to(out.dtype), bias


class GroupedExpertLinear(_WithDeltas):
    """A wrapped layer of all experts of a rank. A call takes the number of rows of each expert."""

    @override
    def forward(self, x: Tensor, rows_of_experts: Sequence[int], *args: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.base(x, rows_of_experts, *args)
        if not len(x):  # no tokens reached this rank, and a GPU's product needs at least one row
            return out, bias
        counts = torch.as_tensor(rows_of_experts, device=x.device)
        delta = torch.cat([self.lora[0].deltas(key, x, counts) for key in self.keys], dim=-1)
        return (out + delta).to(out.dtype), bias


def place_experts(experts: Any, lora: ExpertsLora) -> None:
    """Wrap the layers of Megatron's SequentialMLP or TEGroupedMLP in place, and attach `lora` as `adapter`.

    The name must be `adapter`. Under another name, Megatron-Bridge would treat trained parameters as part of the base.
    Recomputed layers would then have no input with a gradient (`maybe_enable_recompute_inputs_grad`), so that the
    adapters would get no gradient.
    """
    experts.adapter = lora
    if not hasattr(experts, "local_experts"):
        experts.linear_fc1 = GroupedExpertLinear(experts.linear_fc1, lora, (GATE, UP))
        experts.linear_fc2 = GroupedExpertLinear(experts.linear_fc2, lora, (DOWN,))
        return
    for number, expert in enumerate(experts.local_experts):
        expert.linear_fc1 = ExpertLinear(expert.linear_fc1, lora, (GATE, UP), number)
        expert.linear_fc2 = ExpertLinear(expert.linear_fc2, lora, (DOWN,), number)


def _mark(parameter: nn.Parameter, *, is_shared: bool) -> None:
    marked: Any = parameter
    marked.allreduce = marked.sequence_parallel = is_shared


def _tensor(name: str, parameter: nn.Parameter, split: int | None, full_shape: tuple[int, ...]) -> LoraTensor:
    return LoraTensor(name, parameter, split, full_shape, "tensor" if split is None else "expert")
