"""LoRA of several adapters in one forward by grouped products, for devices on which a launch costs more than rounding.

The tokens of a forward are sorted by adapter. One product covers all of them, each with its own adapter's matrix:

    y = x W^T + scale_g * (x A_g^T) B_g^T    for the tokens of adapter g

The number of launches does not depend on the number of adapters. Adapters of one layout lie behind each other in
memory, so that their matrices need no stacking before each product. Sums have another order than those of one adapter
alone, so a token's bits depend on the other adapters of a forward. The separate products of lora.py avoid this.
Gradients of A and B are added to float32 buffers directly, without autograd's nodes for every matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from tinsmith_trainer.engines.peft.adapter import AdapterLayout
from tinsmith_trainer.torch_model.expert_products import grouped_by_rows, grouped_by_tokens
from tinsmith_trainer.torch_model.lora import OwnDelta
from tinsmith_trainer.torch_model.products import linear_product

FLOAT32_BYTES = 4
GRADIENT_BYTES = 1024**3
"""The memory for one module's gradients of all adapters, before they are added to those of each adapter.

The output projections of 64 adapters of rank 32 of Qwen3 would take 1.9 GB.
"""


@dataclass(frozen=True, slots=True)
class TrainedDelta(OwnDelta):
    """An adapter's part of a module, and the float32 memory of its gradients; None if the call does not train."""

    grad_A: Tensor | None  # noqa: N815
    grad_B: Tensor | None  # noqa: N815


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """The consecutive tokens of each adapter in a forward, as host numbers and on the device.

    `sizes`: tokens of each group. `counts` `[groups]` is the same on the device. `scales` `[tokens, 1]` is the scale of
    each token's adapter. `anchor` is an empty tensor that requires a gradient if the forward trains, because neither
    the hidden states of the first layer nor the adapters do.
    """

    sizes: tuple[int, ...]
    counts: Tensor
    scales: Tensor
    anchor: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], scales: Sequence[float], like: Tensor, *, trains: bool) -> TokenGroups:
        """Build the groups on the device and in the dtype of `like`."""
        counts = torch.tensor(sizes, device=like.device)
        by_group = torch.tensor(scales, device=like.device, dtype=like.dtype)
        return cls(
            tuple(sizes),
            counts,
            torch.repeat_interleave(by_group, counts, output_size=sum(sizes)).unsqueeze(1),
            torch.empty(0, device=like.device, requires_grad=trains),
        )

    def fitted(self, tokens: int) -> TokenGroups:
        """Return the groups of a layer that takes this many tokens.

        Some models send only a part of the tokens to a layer, for example to one expert. Then the groups are known only
        if there is one. Raises ValueError for several groups, whose calls then run alone.
        """
        if tokens == len(self.scales):
            return self
        if len(self.sizes) > 1:
            raise ValueError("a layer takes a part of the tokens, so it is unknown which adapters they belong to")
        scales = self.scales[:1].expand(tokens, 1)
        return TokenGroups((tokens,), torch.full_like(self.counts, tokens), scales, self.anchor)

    def part(self, start: int, end: int) -> tuple[TokenGroups, slice]:
        """Return the groups of tokens `start` to `end`, and their places among all groups."""
        sizes = np.diff(np.clip(np.cumsum((0, *self.sizes)), start, end))
        [found] = np.nonzero(sizes)
        places = slice(int(found[0]), int(found[-1]) + 1)
        own = [int(size) for size in sizes[places]]
        counts = torch.tensor(own, device=self.counts.device)
        return TokenGroups(tuple(own), counts, self.scales[start:end], self.anchor), places


@dataclass(frozen=True, slots=True)
class Factors:
    """Stacked matrices `[groups, d_out, d_in]`, and the factors of their gradients.

    `grad` `[tokens, d_out]` is the gradient of the matrices' products, and `x` `[tokens, d_in]` their input.
    """

    stack: Tensor
    grad: Tensor
    x: Tensor

    def part(self, places: slice, start: int, end: int) -> Factors:
        """Return the factors of some groups, which are those of tokens `start` to `end`."""
        return Factors(self.stack[places], self.grad[start:end], self.x[start:end])

    def products(self, counts: Tensor) -> Tensor:
        """Return the gradients `[groups, d_out, d_in]` of groups of these many tokens."""
        return grouped_by_tokens(self.grad, self.x, self.stack, counts)


class _Grouped(ABC):
    """A module's part of each adapter in a forward, whose tokens are sorted by adapter."""

    groups: TokenGroups

    @abstractmethod
    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return A `[groups, rank, d_in]` and B `[groups, d_out, rank]`."""

    @abstractmethod
    def add_gradients(self, of_A: Factors, of_B: Factors) -> None:
        """Add the products of gradients and inputs over each adapter's tokens."""

    def applied(self, x: Tensor, base: nn.Linear, groups: TokenGroups) -> Tensor:
        """Return the module's output for x `[rows, ..., d_in]`."""
        out: Tensor = _GroupedLinear.apply(x.reshape(-1, x.shape[-1]), groups.anchor, base, self)
        return out.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class GroupedDeltas(_Grouped):
    """A module's part of each adapter in a forward. None: the adapter does not change the module.

    `stack`: A `[groups, rank, d_in]` and B `[groups, d_out, rank]` of all adapters, where they lie in one memory.
    """

    groups: TokenGroups
    deltas: tuple[TrainedDelta | None, ...]
    stack: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        """Return the module's output for x `[rows, ..., d_in]`, whose tokens are sorted by adapter."""
        if all(delta is None for delta in self.deltas):
            plain: Tensor = base(x)
            return plain
        groups = self.groups.fitted(x.numel() // x.shape[-1])
        own = self if groups is self.groups else replace(self, groups=groups)
        return own.applied(x, base, groups)

    def part(self, start: int, end: int) -> GroupedDeltas:
        """Return the deltas of tokens `start` to `end`. An adapter's gradients add up over its parts."""
        groups, places = self.groups.part(start, end)
        stack = None if self.stack is None else (self.stack[0][places], self.stack[1][places])
        return GroupedDeltas(groups, self.deltas[places], stack)

    @override
    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return A and B, with zeros where an adapter has a lower rank or does not change the module."""
        if self.stack is not None:
            return self.stack
        found = [delta for delta in self.deltas if delta is not None]
        rank = max(delta.lora_A.shape[0] for delta in found)
        zero = None if len(found) == len(self.deltas) else _zeros_like(found[0])
        filled = [delta or zero for delta in self.deltas]
        each_A = [delta.lora_A for delta in filled if delta is not None]
        each_B = [delta.lora_B for delta in filled if delta is not None]
        return _stack([_padded(own, 0, rank) for own in each_A]), _stack([_padded(own, 1, rank) for own in each_B])

    @override
    def add_gradients(self, of_A: Factors, of_B: Factors) -> None:
        """Add the gradients to the memory of each adapter, for as many adapters at a time as their budget allows."""
        if len(self.deltas) == 1:
            _add_own_gradients(self.deltas[0], of_A, of_B)
            return
        ends = np.cumsum((0, *self.groups.sizes)).tolist()
        bytes_per_group = sum(each.stack[0].numel() * (each.stack.itemsize + FLOAT32_BYTES) for each in (of_A, of_B))
        count = max(1, GRADIENT_BYTES // bytes_per_group)
        for first in range(0, len(self.deltas), count):
            places = slice(first, min(first + count, len(self.deltas)))
            start, end = ends[places.start], ends[places.stop]
            part = self if end - start == ends[-1] else self.part(start, end)
            grad_A, grad_B = (
                each.part(places, start, end).products(part.groups.counts).float() for each in (of_A, of_B)
            )
            part._add(grad_A, grad_B)

    def _add(self, grad_A: Tensor, grad_B: Tensor) -> None:
        targets, values = [], []
        for delta, own_A, own_B in zip(self.deltas, grad_A.unbind(), grad_B.unbind(), strict=True):
            if delta is None or delta.grad_A is None or delta.grad_B is None:
                continue
            rank = delta.lora_A.shape[0]
            targets += [delta.grad_A, delta.grad_B]
            values += [own_A[:rank], own_B[:, :rank]]
        if targets:
            torch._foreach_add_(targets, values)


@dataclass(frozen=True, slots=True)
class StackedDeltas(_Grouped):
    """A module's part of several adapters of one layout, whose tensors lie in one memory.

    The gradients of all adapters are kept together until the end of the backward.
    """

    groups: TokenGroups
    module: str
    stack: tuple[Tensor, Tensor]
    gradients: StackedGradients

    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        """Return the module's output for x `[rows, ..., d_in]`, whose tokens are sorted by adapter."""
        return self.applied(x, base, self.groups.fitted(x.numel() // x.shape[-1]))

    @override
    def stacked(self) -> tuple[Tensor, Tensor]:
        return self.stack

    @override
    def add_gradients(self, of_A: Factors, of_B: Factors) -> None:
        for part, factors in (("lora_A", of_A), ("lora_B", of_B)):
            self.gradients.add(f"{self.module}.{part}", factors.products(self.groups.counts))


class StackedGradients:
    """The gradients of several adapters of one layout during a backward, `[adapters, ...]` by tensor.

    They are added to the adapters' memory in a few operations for each adapter. One for each tensor of each adapter
    would take longer than the products: 64 adapters of Qwen3-0.6B have 25,000 tensors.
    """

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        earlier = self._found.get(name)
        self._found[name] = gradient if earlier is None else earlier + gradient

    def add_to(self, layout: AdapterLayout, memories: Sequence[Tensor]) -> None:
        """Add the gradients to each adapter's flat memory, and forget them."""
        for run in layout.runs(self._found):
            flat = [_flattened(self._found.pop(slot.name), end - slot.offset) for slot, end in run]
            rows = torch.cat(flat, 1).unbind()
            for memory, row in zip(memories, rows, strict=True):
                memory[run[0][0].offset : run[-1][1]].add_(row)


def _flattened(gradient: Tensor, size: int) -> Tensor:
    """Return `[adapters, size]`, with zeros behind the gradient's elements."""
    flat = gradient.flatten(1)
    return functional.pad(flat, (0, size - flat.shape[1])) if flat.shape[1] < size else flat


def _zeros_like(delta: OwnDelta) -> OwnDelta:
    return OwnDelta(torch.zeros_like(delta.lora_A), torch.zeros_like(delta.lora_B), 0.0)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _padded(tensor: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - tensor.shape[dimension]
    return functional.pad(tensor, (0, 0, 0, missing) if dimension == 0 else (0, missing)) if missing else tensor


class _GroupedLinear(torch.autograd.Function):
    """The frozen layer plus the deltas. Only the input, and its products with A, are kept for backward."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, anchor: Tensor, base: nn.Linear, deltas: _Grouped) -> Tensor:
        lora_A, lora_B = deltas.stacked()
        down = grouped_by_rows(x.to(lora_A.dtype), lora_A, deltas.groups.counts).mul_(deltas.groups.scales)
        # The frozen product adds to the small one, which saves a pass over the output.
        out = grouped_by_rows(down, lora_B, deltas.groups.counts).to(x.dtype).addmm_(x, base.weight.T)
        if base.bias is not None:
            out += base.bias
        ctx.base, ctx.deltas = base, deltas
        ctx.save_for_backward(x, down)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down = ctx.saved_tensors
        deltas: _Grouped = ctx.deltas
        counts = deltas.groups.counts
        lora_A, lora_B = deltas.stacked()
        grad = grad.contiguous()
        wide = grad.to(lora_A.dtype)
        grad_down = grouped_by_rows(wide, lora_B.mT, counts).mul_(deltas.groups.scales)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_by_rows(grad_down, lora_A.mT, counts).to(grad.dtype).addmm_(grad, ctx.base.weight)
        if ctx.needs_input_grad[1]:
            deltas.add_gradients(
                Factors(lora_A, grad_down, x.to(lora_A.dtype)),
                Factors(lora_B, wide, down),
            )
        return grad_x, None, None, None


def _add_own_gradients(delta: TrainedDelta | None, of_A: Factors, of_B: Factors) -> None:
    """Add the gradients of a single adapter, by products that have the rank first."""
    if delta is None or delta.grad_A is None or delta.grad_B is None:
        return
    delta.grad_A.add_(linear_product(of_A.grad.T, of_A.x.T))
    delta.grad_B.add_(linear_product(of_B.x.T, of_B.grad.T).T)
