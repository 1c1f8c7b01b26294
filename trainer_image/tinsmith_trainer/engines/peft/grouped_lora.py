"""LoRA of several adapters in one forward by grouped products, for devices on which a launch costs more than rounding.

The tokens of a forward are sorted by adapter. One product covers all of them, each with its own adapter's matrix:

    y = x W^T + scale_g * (x A_g^T) B_g^T    for the tokens of adapter g

The number of launches does not depend on the number of adapters. Sums have another order than those of one adapter
alone, so a token's bits depend on the other adapters of a forward. The separate products of lora.py avoid this.
Gradients of A and B are added to float32 buffers directly, without autograd's nodes for every matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from tinsmith_trainer.torch_model.expert_products import grouped_by_rows, grouped_by_tokens
from tinsmith_trainer.torch_model.lora import OwnDelta


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


@dataclass(frozen=True, slots=True)
class GroupedDeltas:
    """A module's part of each adapter in a forward. None: the adapter does not change the module."""

    groups: TokenGroups
    deltas: tuple[TrainedDelta | None, ...]

    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        """Return the module's output for x `[rows, ..., d_in]`, whose tokens are sorted by adapter."""
        if all(delta is None for delta in self.deltas):
            plain: Tensor = base(x)
            return plain
        rows = x.reshape(-1, x.shape[-1])
        groups = self.groups.fitted(len(rows))
        own = self if groups is self.groups else replace(self, groups=groups)
        out: Tensor = _GroupedLinear.apply(rows, groups.anchor, base, own)
        return out.view(*x.shape[:-1], -1)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return A `[groups, rank, d_in]` and B `[groups, d_out, rank]`, with zeros where an adapter has less."""
        found = [delta for delta in self.deltas if delta is not None]
        rank = max(delta.lora_A.shape[0] for delta in found)
        zero = None if len(found) == len(self.deltas) else _zeros_like(found[0])
        filled = [delta or zero for delta in self.deltas]
        each_A = [delta.lora_A for delta in filled if delta is not None]
        each_B = [delta.lora_B for delta in filled if delta is not None]
        return _stack([_padded(own, 0, rank) for own in each_A]), _stack([_padded(own, 1, rank) for own in each_B])

    def add_gradients(self, grad_A: Tensor, grad_B: Tensor) -> None:
        """Add gradients of the stacked A and B to the memory of each adapter."""
        targets, values = [], []
        for delta, own_A, own_B in zip(self.deltas, grad_A.float().unbind(), grad_B.float().unbind(), strict=True):
            if delta is None or delta.grad_A is None or delta.grad_B is None:
                continue
            rank = delta.lora_A.shape[0]
            targets += [delta.grad_A, delta.grad_B]
            values += [own_A[:rank], own_B[:, :rank]]
        if targets:
            torch._foreach_add_(targets, values)


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
    def forward(ctx: Any, x: Tensor, anchor: Tensor, base: nn.Linear, deltas: GroupedDeltas) -> Tensor:
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
        deltas: GroupedDeltas = ctx.deltas
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
                grouped_by_tokens(grad_down, x.to(lora_A.dtype), lora_A, counts),
                grouped_by_tokens(wide, down, lora_B, counts),
            )
        return grad_x, None, None, None
