"""LoRA on Megatron's parallel linear layers, one A and one B per projection of the transformers model.

Megatron fuses query, key and value into one layer, and gate and up into another layer. Each projection has a separate
adapter, so an adapter has the same tensors as in PEFT. The delta of a projection is added to the projection's columns
in the output of the fused layer:

    y[columns of p] += scale * (x A_p^T) B_p^T

In a forward that several calls share, one grouped product covers the tokens of all adapters.

A and B are padded to the largest rank of any adapter. Padding is zero, adds nothing, and stays zero. A padded row of A
gets the gradient through a zero column of B, and a padded column of B through a zero row of A, so both gradients are
exactly zero.

On each tensor rank, a column-parallel layer has some rows of B and all of A; a row-parallel layer has some columns of A
and all of B. Factors that are not divided have the same gradient on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.engines.megatron.model.weights import Part
from tinsmith_trainer.engines.megatron.step.adapter_route import AdapterRoute, Shares
from tinsmith_trainer.engines.megatron.step.tensor_parts import TensorPart
from tinsmith_trainer.torch_model.expert_products import by_expert

ROWS, COLUMNS = 0, 1

Join = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """A tensor of the adapter on this rank.

    `name` is the tensor's name in the whole model, as in an AdapterState ("model.layers.0.self_attn.q_proj.lora_A").
    `parameter` is this rank's part of the tensor, float32. Dimension `split` is divided into equal parts, in order,
    among the ranks of tensor or expert parallelism (`among`). If `split` is None, all ranks have the same tensor.
    `full_shape` is the shape in the whole model: `[max_rank, d_in]` or `[d_out, max_rank]`; for experts, the first
    dimension is the number of experts. The parts of a vocabulary may together be longer than the full shape; the
    additional values stay zero.
    """

    name: str
    parameter: nn.Parameter
    split: int | None
    full_shape: tuple[int, ...]
    among: Literal["tensor", "expert"] = "tensor"

    def part(self) -> TensorPart:
        """Return the data for cutting this rank's part out of an adapter, and for joining the parts of all ranks."""
        return TensorPart(self.name, tuple(self.parameter.shape), self.split, self.full_shape, self.among)


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of the transformers model, with the sizes in the whole model."""

    name: str
    in_features: int
    out_features: int


class ParallelLora(nn.Module):
    """A layer that replaces a frozen Column- or RowParallelLinear, and adds the adapters of the layer's projections.

    `split` is the divided dimension of the frozen weight, and `part` is the part on this rank. `join` arranges the
    outputs of the projections in the same way as in the fused layer. Columns after the end of a vocabulary are -inf, so
    that the probability of these columns is 0.
    """

    def __init__(
        self,
        base: nn.Module,
        projections: Sequence[Projection],
        *,
        split: int,
        part: Part,
        max_rank: int,
        route: AdapterRoute,
        join: Join | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self._route = route
        self.split = split
        self.scale = 0.0
        self._projections = tuple(projections)
        self._max_rank = max_rank
        self._join = join or _only
        self._real_columns = _length(part.of(projections[0].out_features)) if split == ROWS and not join else None
        self.lora_A = nn.ParameterList(self._zeros(max_rank, self._in_features(p, part)) for p in projections)
        self.lora_B = nn.ParameterList(self._zeros(self._out_features(p, part), max_rank) for p in projections)
        for A, B in zip(self.lora_A, self.lora_B, strict=True):
            _mark(A, COLUMNS if split == COLUMNS else None)
            _mark(B, ROWS if split == ROWS else None)

    def _zeros(self, rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=self.weight.device))

    def _in_features(self, projection: Projection, part: Part) -> int:
        return part.width(projection.in_features) if self.split == COLUMNS else projection.in_features

    def _out_features(self, projection: Projection, part: Part) -> int:
        return part.width(projection.out_features) if self.split == ROWS else projection.out_features

    @property
    def weight(self) -> Tensor:
        """The rank's part of the frozen weight, which Megatron accesses."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.base(x, *args, **kwargs)
        out = (out + self._delta(x)).to(out.dtype)
        return self._mask_padding(out), bias

    def _mask_padding(self, out: Tensor) -> Tensor:
        if self._real_columns is None or self._real_columns == out.shape[-1]:
            return out
        padding = torch.arange(out.shape[-1], device=out.device) >= self._real_columns
        return out.masked_fill(padding, -torch.inf)

    def tensors(self) -> Iterator[LoraTensor]:
        split_A, split_B = (None, ROWS) if self.split == ROWS else (COLUMNS, None)
        for projection, A, B in zip(self._projections, self.lora_A, self.lora_B, strict=True):
            yield LoraTensor(f"{projection.name}.lora_A", A, split_A, (self._max_rank, projection.in_features))
            yield LoraTensor(f"{projection.name}.lora_B", B, split_B, (projection.out_features, self._max_rank))

    def _delta(self, x: Tensor) -> Tensor:
        """Compute the delta. All projections share one product with x, and one exchange between tensor ranks."""
        if shares := self._route.shares:
            return self._shared_delta(x, shares)
        down = x.to(self.lora_A[0].dtype) @ torch.cat(tuple(self.lora_A)).T * self.scale
        parts = self._exchanged(down).chunk(len(self._projections), dim=-1)
        return self._join([part @ B.T for part, B in zip(parts, self.lora_B, strict=True)])

    def _exchanged(self, down: Tensor) -> Tensor:
        exchange = (
            copy_to_tensor_model_parallel_region if self.split == ROWS else reduce_from_tensor_model_parallel_region
        )
        exchanged: Tensor = exchange(down)
        return exchanged

    def _shared_delta(self, x: Tensor, shares: Shares) -> Tensor:
        """Compute the delta of several adapters, whose rows of x, or packed tokens, follow each other."""
        outer = shares[0].dimension
        by_adapter = x.transpose(0, outer)
        tokens = [share.tokens(x) for share in shares]
        counts = torch.tensor(tokens, device=x.device)
        scales = torch.tensor([share.scale for share in shares], device=x.device)
        by_token = torch.repeat_interleave(scales, counts, output_size=sum(tokens)).unsqueeze(1)
        down = by_expert(by_adapter.flatten(0, 1), self._stacked_A(shares), counts) * by_token
        parts = self._exchanged(down).chunk(len(self._projections), dim=-1)
        out = self._join(
            [
                by_expert(part, torch.stack([share.tensors[f"{own.name}.lora_B"] for share in shares]), counts)
                for part, own in zip(parts, self._projections, strict=True)
            ]
        )
        return out.view(*by_adapter.shape[:2], -1).transpose(0, outer)

    def _stacked_A(self, shares: Shares) -> Tensor:
        """Return each share's A of all projections, one after the other: `[shares, projections * rank, d_in]`."""
        names = [f"{projection.name}.lora_A" for projection in self._projections]
        return torch.stack([torch.cat([share.tensors[name] for name in names]) for share in shares])


def _only(outputs: Sequence[Tensor]) -> Tensor:
    """Return the output of a layer with a single projection."""
    (output,) = outputs
    return output


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _mark(parameter: nn.Parameter, split: int | None) -> None:
    """Set the attributes that Megatron reads for the gradient norm, so that a value on all tensor ranks counts once."""
    marked: Any = parameter
    marked.tensor_model_parallel = split is not None
    marked.partition_dim = -1 if split is None else split
    marked.partition_stride = 1
    marked.allreduce = True


class AdaptedLayer(Protocol):
    scale: float

    def tensors(self) -> Iterator[LoraTensor]: ...


class MegatronLora:
    """The adapter weights in a pipeline stage, for one adapter at a time.

    `tensors` are sorted by name. All tensors exist for every adapter, and the tensors of untrained modules are zero.
    `route` lets a forward use other adapters.
    """

    def __init__(self, layers: Sequence[AdaptedLayer], route: AdapterRoute) -> None:
        self.route = route
        self._layers = tuple(layers)
        found = [tensor for layer in layers for tensor in layer.tensors()]
        self.tensors = tuple(sorted(found, key=lambda tensor: tensor.name))

    def set_scale(self, scale: float) -> None:
        """Set alpha / rank of the current adapter."""
        for layer in self._layers:
            layer.scale = scale
