"""LoRA over a shared base model: each linear layer adds the deltas of whichever adapters are routed.

Rows of a batch are sorted by adapter into `g` equal groups. A route gives every module its
stacked tensors for these groups, so one batched matmul serves all adapters:

    y = x W^T + scale_g * (x A_g^T) B_g^T

Shapes: x `[rows, length, d_in]` with rows divisible by g, A `[g, rank, d_in]`, B `[g, d_out, rank]`,
scale `[g]`. Ranks below the stack's are padded with zeros, which add nothing and receive
exactly zero gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ATTENTION_PARENTS = ("self_attn", "attention", "attn")
MLP_PARENTS = ("mlp", "feed_forward", "ffn")
UNEMBED_NAME = "lm_head"


@dataclass(frozen=True, slots=True)
class StackedDelta:
    """One module's adapters: A `[g, rank, d_in]`, B `[g, d_out, rank]`, scale `[g, 1, 1]`."""

    lora_A: Tensor
    lora_B: Tensor
    scale: Tensor


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

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        route: Route | None = getattr(_current, "route", None)
        delta = None if route is None else route.get(self.key)
        return out if delta is None else out + _apply(x, delta).view_as(out).to(out.dtype)


def _apply(x: Tensor, delta: StackedDelta) -> Tensor:
    # Always bmm, also for one group: another kernel would round differently, and an
    # adapter's bits must not depend on company.
    groups, _, d_in = delta.lora_A.shape
    rows = x.reshape(groups, -1, d_in).to(delta.lora_A.dtype)
    return torch.bmm(torch.bmm(rows, delta.lora_A.mT) * delta.scale, delta.lora_B.mT)


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
