"""LoRA over a shared base model: each linear layer adds the deltas of whichever adapters are routed.

Rows of a batch are sorted by adapter into `g` equal groups. A route gives every module its
stacked tensors for these groups:

    y = x W^T + scale_g * (x A_g^T) B_g^T

Shapes: x `[rows, length, d_in]` with rows divisible by g, A `[g, rank, d_in]`, B `[g, d_out, rank]`,
scale `[g, 1, 1]`. Ranks below the stack's may be padded with zeros, which add nothing and receive
exactly zero gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

ATTENTION_PARENTS = ("self_attn", "attention", "attn")
MLP_PARENTS = ("mlp", "feed_forward", "ffn")
UNEMBED_NAME = "lm_head"


@dataclass(frozen=True, slots=True)
class StackedDelta:
    """One module's adapters: A `[g, rank, d_in]`, B `[g, d_out, rank]`, scale `[g, 1, 1]`.

    `isolated` computes each group by products of its own, the base's included, so that a group's
    bits are those it has alone; else one product serves all groups, which is faster for many small ones.
    """

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815
    scale: Tensor
    isolated: bool = False


Route = Mapping[str, StackedDelta]

_current = threading.local()


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Applies a route to every forward (and recomputation in backward) of this thread."""
    previous = getattr(_current, "route", None)
    _current.route = route
    try:
        yield
    finally:
        _current.route = previous


class StackedLoraLinear(nn.Module):
    """A frozen linear layer plus the routed adapters' deltas. `key` is the module's name in the model."""

    def __init__(self, base: nn.Linear, key: str) -> None:
        super().__init__()
        self.base = base
        self.key = key

    @property
    def weight(self) -> Tensor:
        """The frozen weight `[d_out, d_in]`; model code that peeks at `.weight` keeps working."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        route: Route | None = getattr(_current, "route", None)
        delta = None if route is None else route.get(self.key)
        if delta is None:
            out: Tensor = self.base(x)
            return out
        return apply_delta(x, self.base, delta)


def apply_delta(x: Tensor, base: nn.Linear, delta: StackedDelta) -> Tensor:
    """The frozen layer plus the deltas, for x `[rows, ..., d_in]` in g equal groups of rows."""
    groups = delta.lora_A.shape[0]
    if not delta.isolated:
        together: Tensor = base(x)
        return together + _batched(x.reshape(groups, -1, x.shape[-1]), delta).view_as(together).to(together.dtype)
    out: Tensor = _IsolatedLoraLinear.apply(
        x.reshape(groups, -1, x.shape[-1]), delta.lora_A, delta.lora_B, delta.scale, base.weight, base.bias
    )
    return out.view(*x.shape[:-1], -1)


def _batched(x: Tensor, delta: StackedDelta) -> Tensor:
    down = torch.bmm(x.to(delta.lora_A.dtype), delta.lora_A.mT)
    return torch.bmm(down * delta.scale, delta.lora_B.mT)


class _IsolatedLoraLinear(torch.autograd.Function):
    """The layer with the frozen base inside, so that each product adds onto the last one in place.

    Every matrix product takes one group by itself. One product over all groups would have another
    shape, for which BLAS may sum in another order, and an adapter's bits must not depend on company.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        down = x.new_empty((*x.shape[:2], lora_A.shape[1]), dtype=lora_A.dtype)
        out = x.new_empty((*x.shape[:2], weight.shape[0]))
        for g in range(x.shape[0]):
            torch.mm(x[g].to(lora_A.dtype), lora_A[g].T, out=down[g])
        down *= scale
        for g in range(x.shape[0]):
            _base_product(x[g], weight, bias, out[g])
            _add_product(out[g], down[g], lora_B[g].T)
        ctx.save_for_backward(x, down, lora_A, lora_B, scale, weight)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, lora_A, lora_B, scale, weight = ctx.saved_tensors
        needs_x, needs_A, needs_B, *_ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if needs_x else None
        grad_A = torch.empty_like(lora_A) if needs_A else None
        grad_B = torch.empty_like(lora_B) if needs_B else None
        grad_down = torch.empty_like(down)
        grad = grad.contiguous()
        wide = grad.to(lora_A.dtype)
        for g in range(x.shape[0]):
            torch.mm(wide[g], lora_B[g], out=grad_down[g])
        grad_down *= scale
        for g in range(x.shape[0]):
            if grad_A is not None:
                torch.mm(grad_down[g].T, x[g].to(lora_A.dtype), out=grad_A[g])
            if grad_B is not None:
                torch.mm(wide[g].T, down[g], out=grad_B[g])
            if grad_x is not None:
                torch.mm(grad[g], weight, out=grad_x[g])
                _add_product(grad_x[g], grad_down[g], lora_A[g])
        return grad_x, grad_A, grad_B, None, None, None


def _base_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """`out += left @ right`; adapters are float32 whatever the base's dtype, rounded once at the end."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right


def module_family(name: str) -> str | None:
    """ "attn", "mlp" or "unembed" for a linear layer that LoRA covers, else None."""
    parts = name.split(".")
    if parts[-1] == UNEMBED_NAME:
        return "unembed"
    if any(part in ATTENTION_PARENTS for part in parts[:-1]):
        return "attn"
    if any(part in MLP_PARENTS for part in parts[:-1]):
        return "mlp"
    return None


def wrap_linears(model: nn.Module) -> dict[str, StackedLoraLinear]:
    """Replaces every linear layer that LoRA may cover; returns the wrappers by name, in model order."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module_family(name) is not None
    }
    wrapped = {}
    for name, linear in found.items():
        parent_name, _, child = name.rpartition(".")
        layer = StackedLoraLinear(linear, name)
        setattr(model.get_submodule(parent_name), child, layer)
        wrapped[name] = layer
    return wrapped
