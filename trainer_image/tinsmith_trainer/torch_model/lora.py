"""LoRA over a shared base model: each linear layer adds the deltas of whichever adapters are routed.

Rows of a batch are sorted by adapter into `g` equal groups. A route says what each module adds to these groups:

    y = x W^T + scale_g * (x A_g^T) B_g^T

Shapes: x `[rows, length, d_in]` with rows divisible by g. There are two ways. Stacked, one product serves all groups,
which is faster for many small ones. Apart, each group has products of its own, the base's included, so that its bits
are those that it has alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.torch_model.products import add_product_by_parts, linear_product, product_by_parts

ATTENTION_PARENTS = ("self_attn", "attention", "attn", "linear_attn", "mamba")
MLP_PARENTS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "experts", "shared_mlp", "shared_experts")
MIXER_PARENT = "mixer"
"""Of a layer that is one thing or the other: attention, a state space, or an MLP, told apart by its projections."""
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
UNTRAINED_NAMES = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba", "x_proj", "dt_proj")
"""Layers that say where a token goes, how much of it counts, or how fast a state decays. Tinker has no adapters there
either: `get_lora_param_count` of tinker_cookbook comes out without them."""
UNEMBED_NAME = "lm_head"


@dataclass(frozen=True, slots=True)
class StackedDelta:
    """One module's adapters as one: A `[g, rank, d_in]`, B `[g, d_out, rank]`, scale `[g, 1, 1]`.

    Ranks below the stack's may be padded with zeros, which add nothing and receive exactly zero gradient.
    """

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.lora_A.nbytes + self.lora_B.nbytes


@dataclass(frozen=True, slots=True)
class OwnDelta:
    """One adapter's part of a module: A `[rank, d_in]`, B `[d_out, rank]`, or those of a layer's experts."""

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815
    scale: float

    @property
    def nbytes(self) -> int:
        return self.lora_A.nbytes + self.lora_B.nbytes


@dataclass(frozen=True, slots=True)
class OwnSpan:
    """Tokens `start` to `end` of a forward, and the delta that they have."""

    start: int
    end: int
    own: OwnDelta


@dataclass(frozen=True, slots=True)
class DeltasApart:
    """One module's adapters, each by products of its own; of any rank. None: this one leaves the module as it is.

    `tokens`: of each group, which lie one behind the other in the input. `product_tokens`: what one product takes, so
    that it has one shape, and a token's bits are those that it has alone, whoever is beside it. None: all there are.
    """

    groups: tuple[OwnDelta | None, ...]
    tokens: tuple[int, ...]
    product_tokens: int | None

    def parts(self, x: Tensor) -> Iterator[tuple[OwnDelta, Tensor]]:
        """Of each group that has a delta: its rows of x `[tokens, ...]`."""
        # A layer of an expert has the tokens that were sent to it; then there is one group.
        sizes = [len(x)] if len(self.groups) == 1 else list(self.tokens)
        for own, rows in zip(self.groups, torch.split(x, sizes), strict=True):
            if own is not None:
                yield own, rows

    def spans(self) -> Iterator[OwnSpan]:
        """Where each group that has a delta lies in the input."""
        end = 0
        for own, tokens in zip(self.groups, self.tokens, strict=True):
            end += tokens
            if own is not None:
                yield OwnSpan(end - tokens, end, own)


class OwnProduct(Protocol):
    """What is routed to a module where no gradient is needed."""

    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        """The module's output `[rows, ..., d_out]` from its input and the frozen layer."""
        ...

    def spans(self, tokens: int) -> Iterable[OwnSpan]:
        """Which of so many tokens have which delta."""
        ...


Route = Mapping[str, StackedDelta | DeltasApart | OwnProduct]
"""What is routed to each module, by name."""

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


def is_routed_apart() -> bool:
    """Whether this thread's forward is one whose rows keep their bits whoever is beside them."""
    route: Route = getattr(_current, "route", None) or {}
    return isinstance(next(iter(route.values()), None), DeltasApart)


def spans_of(key: str, tokens: int) -> Sequence[OwnSpan]:
    """Of a layer's experts, which compute all tokens of a forward together: whose tokens are where."""
    route: Route = getattr(_current, "route", None) or {}
    delta = route.get(key)
    if delta is None:
        return ()
    assert not isinstance(delta, StackedDelta), f"{key}: adapters of experts are never stacked"
    return tuple(delta.spans() if isinstance(delta, DeltasApart) else delta.spans(tokens))


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

    def lora_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of A `[rank, d_in]` and B `[d_out, rank]`."""
        return (rank, self.in_features), (self.out_features, rank)

    @override
    def forward(self, x: Tensor) -> Tensor:
        route: Route | None = getattr(_current, "route", None)
        delta: StackedDelta | DeltasApart | OwnProduct | None = None if route is None else route.get(self.key)
        if delta is None:
            out: Tensor = self.base(x)
            return out
        return apply_delta(x, self.base, delta)


def apply_delta(x: Tensor, base: nn.Linear, delta: StackedDelta | DeltasApart | OwnProduct) -> Tensor:
    """The frozen layer plus the deltas, for x `[rows, ..., d_in]` in g equal groups of rows."""
    if isinstance(delta, DeltasApart):
        return _apart(x, base, delta)
    if not isinstance(delta, StackedDelta):
        return delta(x, base)
    groups = delta.lora_A.shape[0]
    together: Tensor = base(x)
    return together + _batched(x.reshape(groups, -1, x.shape[-1]), delta).view_as(together).to(together.dtype)


def _batched(x: Tensor, delta: StackedDelta) -> Tensor:
    down = torch.bmm(x.to(delta.lora_A.dtype), delta.lora_A.mT)
    return torch.bmm(down * delta.scale, delta.lora_B.mT)


def _apart(x: Tensor, base: nn.Linear, delta: DeltasApart) -> Tensor:
    tensors = [tensor for own in delta.groups if own is not None for tensor in (own.lora_A, own.lora_B)]
    out: Tensor = _LoraLinearApart.apply(x.reshape(-1, x.shape[-1]), base.weight, base.bias, delta, *tensors)
    return out.view(*x.shape[:-1], -1)


class _LoraLinearApart(torch.autograd.Function):
    """The layer with the frozen base inside, so that each product adds onto the last one in place.

    One product over all rows would have another shape in other company, for which BLAS may sum in another order. So
    each takes a part of one size. The gradients of A and B are sums over a group, and one product each: its rows are
    of one call, whoever else is in the forward.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, delta: DeltasApart, *adapters: Tensor
    ) -> Tensor:
        part = delta.product_tokens
        out = product_by_parts(x, weight, bias, part)
        downs = []
        for (own, rows), (_, own_out) in zip(delta.parts(x), delta.parts(out), strict=True):
            downs.append(product_by_parts(rows.to(own.lora_A.dtype), own.lora_A, None, part) * own.scale)
            add_product_by_parts(own_out, downs[-1], own.lora_B.T, part)
        ctx.delta = delta
        ctx.save_for_backward(x, weight, *adapters, *downs)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        delta: DeltasApart = ctx.delta
        adapters, downs = iter(saved[: len(saved) // 3 * 2]), saved[len(saved) // 3 * 2 :]
        needs_x, needs_adapters = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        part = delta.product_tokens
        grad = grad.contiguous()
        grad_x = product_by_parts(grad, weight.T, None, part) if needs_x else torch.empty_like(x)
        grads: list[Tensor | None] = []
        spans = zip(delta.parts(grad), delta.parts(x), delta.parts(grad_x), downs, strict=True)
        for (own, own_grad), (_, rows), (_, own_grad_x), down in spans:
            lora_A, lora_B = next(adapters), next(adapters)
            wide = own_grad.to(lora_A.dtype)
            grad_down = product_by_parts(wide, lora_B.T, None, part) * own.scale
            if needs_x:
                add_product_by_parts(own_grad_x, grad_down, lora_A, part)
            if needs_adapters:
                # The few rows come first: the other way round MKL takes five times as long for a rank of 8.
                grads.append(linear_product(grad_down.T, rows.to(lora_A.dtype).T))
                grads.append(linear_product(down.T, wide.T).T)
            else:
                grads += [None, None]
        return grad_x if needs_x else None, None, None, None, *grads


def module_family(name: str) -> str | None:
    """ "attn", "mlp" or "unembed" for a linear layer that LoRA covers, else None."""
    parts = name.split(".")
    if parts[-1] == UNEMBED_NAME:
        return "unembed"
    if parts[-1] in UNTRAINED_NAMES:
        return None
    if any(part in ATTENTION_PARENTS for part in parts[:-1]):
        return "attn"
    if any(part in MLP_PARENTS for part in parts[:-1]):
        return "mlp"
    if MIXER_PARENT in parts[:-1]:
        return "mlp" if parts[-1] in MLP_NAMES else "attn"
    return None


def wrap_linears(model: nn.Module) -> dict[str, StackedLoraLinear]:
    """Replaces every linear layer; returns the wrappers by name, in model order.

    Those that LoRA does not cover (`module_family` is None) have their products apart all the same.
    """
    found = {name: module for name, module in model.named_modules() if type(module).forward is nn.Linear.forward}
    wrapped = {}
    for name, linear in found.items():
        parent_name, _, child = name.rpartition(".")
        layer = StackedLoraLinear(linear, name)
        setattr(model.get_submodule(parent_name), child, layer)
        wrapped[name] = layer
    return wrapped
