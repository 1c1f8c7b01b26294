"""LoRA over a shared base model. Each linear layer adds the deltas of the adapters that a route names.

Rows of a batch are sorted by adapter into `g` equal groups. A route maps each module to the deltas that the module adds
to these groups:

    y = x W^T + scale_g * (x A_g^T) B_g^T

x is `[rows, length, d_in]`, and g divides the number of rows. A route uses one of two kinds of products. Stacked: one
product covers all groups, which is faster for many small groups. Apart: each group has separate products, including the
products of the base. So the bits of a group are the same as in a forward of this group alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from tinsmith_trainer.torch_model.products import (
    add_product_by_parts,
    linear_product,
    product_by_parts,
    uses_onednn,
)

ATTENTION_PARENTS = ("self_attn", "attention", "attn", "linear_attn", "mamba")
MLP_PARENTS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "experts", "shared_mlp", "shared_experts")
ALIGNMENT_BYTES = 64
"""The alignment of PyTorch's new memory on a CPU."""
MIXER_PARENT = "mixer"
"""A layer name that models use for attention, for state spaces and for MLPs.

In layers with this name, the names of the projections show the kind of the layer.
"""
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
UNTRAINED_NAMES = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba", "x_proj", "dt_proj")
"""The names of layers that choose the experts of a token, or compute a token's weight or the decay of a state.

Tinker has no adapters for these layers: `get_lora_param_count` of tinker_cookbook does not count these layers.
"""
UNTRAINED_PARENT = "indexer"
"""The module that selects the tokens of sparse attention. No gradient passes through a selection."""
UNEMBED_NAME = "lm_head"


@dataclass(frozen=True, slots=True)
class StackedDelta:
    """A stack of one module's adapters: A `[g, rank, d_in]`, B `[g, d_out, rank]`, scale `[g, 1, 1]`.

    Adapters of a lower rank may be padded with zeros. The zeros add nothing, and the gradient of the zeros is exactly
    zero.
    """

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.lora_A.nbytes + self.lora_B.nbytes


@dataclass(frozen=True, slots=True)
class OwnDelta:
    """An adapter's part of a module: A `[rank, d_in]`, B `[d_out, rank]`, or the tensors of a layer's experts."""

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815
    scale: float

    @property
    def nbytes(self) -> int:
        return self.lora_A.nbytes + self.lora_B.nbytes


@dataclass(frozen=True, slots=True)
class OwnSpan:
    """Tokens `start` to `end` of a forward, and the delta for these tokens."""

    start: int
    end: int
    own: OwnDelta

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def of(self, x: Tensor) -> Tensor:
        return x[self.start : self.end]


@dataclass(frozen=True, slots=True)
class DeltasApart:
    """The adapters of a module, of any rank.

    Each adapter has separate products. If a group's adapter is None, the group's output is the base model's output.

    `tokens` are the lengths of the input's groups, in order. `product_tokens` is the size of one product. With
    `product_tokens`, all products have one shape, and a token's bits do not depend on other tokens. If `product_tokens`
    is None, one product covers all tokens.
    """

    groups: tuple[OwnDelta | None, ...]
    tokens: tuple[int, ...]
    product_tokens: int | None

    def batches(self, x: Tensor) -> Sequence[_LongGroup | _ShortGroups]:
        """Return all groups that have a delta, for x `[tokens, ...]`. Short groups with the same rank share a batch."""
        # An expert's layer receives only the tokens that are routed to it. In this case there is one group.
        one = self.groups[0] if len(self.groups) == 1 else None
        spans = list(self.spans()) if one is None else [OwnSpan(0, len(x), one)]
        batches: dict[tuple[str, int], list[int]] = {}
        are_batched: dict[tuple[int, torch.dtype], bool] = {}  # equal for all adapters of one rank
        for place, span in enumerate(spans):
            rank, dtype = kind = span.own.lora_A.shape[0], span.own.lora_A.dtype
            if kind not in are_batched:
                are_batched[kind] = dtype == x.dtype and self._can_batch(span.own, x)
            is_short = are_batched[kind] and span.tokens <= (self.product_tokens or 0)
            batches.setdefault(("rank", rank) if is_short else ("place", place), []).append(place)
        return [
            _ShortGroups.of(places, [spans[place] for place in places], self.product_tokens or 0)
            if key[0] == "rank"
            else _LongGroup(places, spans[places[0]], self.product_tokens)
            for key, places in batches.items()
        ]

    def _can_batch(self, own: OwnDelta, x: Tensor) -> bool:
        """Return whether a batched product of short groups has the same bits as separate products."""
        part = self.product_tokens or 0
        return not (uses_onednn(x, own.lora_A, part) or uses_onednn(x, own.lora_B, part))

    def spans(self) -> Iterator[OwnSpan]:
        """Yield the position in the input of each group that has a delta."""
        end = 0
        for own, tokens in zip(self.groups, self.tokens, strict=True):
            end += tokens
            if own is not None:
                yield OwnSpan(end - tokens, end, own)


class LinearProduct(Protocol):
    """A linear module's own way to compute its output on a route."""

    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        """Return the module's output `[rows, ..., d_out]` from the module's input and the frozen layer."""
        ...


@runtime_checkable
class OwnProduct(LinearProduct, Protocol):
    """A product that also serves the experts of a layer, and needs no gradient."""

    def spans(self, tokens: int) -> Iterable[OwnSpan]:
        """Return the spans of this many tokens that have a delta."""
        ...


Route = Mapping[str, StackedDelta | DeltasApart | LinearProduct]
"""For each module name, the deltas or the product of the module."""

_current = threading.local()


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Apply a route to every forward of this thread, and to every recomputation in backward."""
    previous = getattr(_current, "route", None)
    _current.route = route
    try:
        yield
    finally:
        _current.route = previous


def is_routed_apart() -> bool:
    """Return True if in this thread's forward, the bits of a row do not depend on other rows."""
    route: Route = getattr(_current, "route", None) or {}
    return isinstance(next(iter(route.values()), None), DeltasApart)


def spans_of(key: str, tokens: int) -> Sequence[OwnSpan]:
    """Return the spans of a layer's experts. Experts compute all tokens of a forward together."""
    route: Route = getattr(_current, "route", None) or {}
    delta = route.get(key)
    if delta is None:
        return ()
    if isinstance(delta, DeltasApart):
        return tuple(delta.spans())
    assert isinstance(delta, OwnProduct), f"{key}: adapters of experts are neither stacked nor grouped"
    return tuple(delta.spans(tokens))


class StackedLoraLinear(nn.Module):
    """A frozen linear layer that adds the deltas of the adapters on the route.

    `key` is the module's name in the model.
    """

    def __init__(self, base: nn.Linear, key: str) -> None:
        super().__init__()
        self.base = base
        self.key = key

    @property
    def weight(self) -> Tensor:
        """The frozen weight `[d_out, d_in]`, for model code that reads `.weight`."""
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
        """Return the shapes of A `[rank, d_in]` and B `[d_out, rank]`."""
        return (rank, self.in_features), (self.out_features, rank)

    @override
    def forward(self, x: Tensor) -> Tensor:
        route: Route | None = getattr(_current, "route", None)
        delta: StackedDelta | DeltasApart | LinearProduct | None = None if route is None else route.get(self.key)
        if delta is None:
            out: Tensor = self.base(x)
            return out
        return apply_delta(x, self.base, delta)


def apply_delta(x: Tensor, base: nn.Linear, delta: StackedDelta | DeltasApart | LinearProduct) -> Tensor:
    """Return the frozen layer's output plus the deltas, for x `[rows, ..., d_in]` in g equal groups of rows."""
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
    out: Tensor = _LoraLinearApart.apply(x.reshape(-1, x.shape[-1]), base, delta, *tensors)
    return out.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class _LongGroup:
    """The products of one group, computed part by part for any length.

    `places`: the index of the group among the groups with a delta.
    """

    places: Sequence[int]
    span: OwnSpan
    part: int | None

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the delta to the group's rows of `out`, and return the product of the group's rows of x with A."""
        own = self.span.own
        down = product_by_parts(self.span.of(x).to(own.lora_A.dtype), own.lora_A, None, self.part) * own.scale
        add_product_by_parts(self.span.of(out), down, own.lora_B.T, self.part)
        return down

    def backward(self, grad: Tensor, grad_x: Tensor | None) -> Tensor:
        """Add the delta's gradient to the group's rows of `grad_x`, and return the gradient of the product with A."""
        own = self.span.own
        wide = self.span.of(grad).to(own.lora_A.dtype)
        grad_down = product_by_parts(wide, own.lora_B.T, None, self.part) * own.scale
        if grad_x is not None:
            add_product_by_parts(self.span.of(grad_x), grad_down, own.lora_A, self.part)
        return grad_down

    def own_gradients(self, grad: Tensor, x: Tensor, down: Tensor, grad_down: Tensor) -> Iterator[Sequence[Tensor]]:
        """Yield the gradients of A and B.

        In each product, the LoRA rank is the first dimension. If the LoRA rank is the last dimension, MKL takes five
        times as long for a rank of 8.
        """
        dtype = self.span.own.lora_A.dtype
        grad_A = linear_product(grad_down.T, self.span.of(x).to(dtype).T)
        yield grad_A, linear_product(down.T, self.span.of(grad).to(dtype).T).T


@dataclass(frozen=True, slots=True)
class _ShortGroups:
    """Batched products of groups of one rank. Each group has at most `part` tokens, and is padded to this number.

    Each product of a batch is computed separately, so the bits of a product do not depend on other groups. Eight
    adapters of 16 tokens in a batch take as long as two adapters in sequence, because the calls cost more than the
    arithmetic. `are_full`: the groups follow each other, and none needs padding, so their rows are not copied.
    """

    places: Sequence[int]
    spans: Sequence[OwnSpan]
    part: int
    are_full: bool

    @classmethod
    def of(cls, places: Sequence[int], spans: Sequence[OwnSpan], part: int) -> _ShortGroups:
        starts = range(spans[0].start, spans[0].start + len(spans) * part, part)
        are_full = all(
            (span.start, span.end) == (start, start + part) for span, start in zip(spans, starts, strict=True)
        )
        return cls(places, spans, part, are_full)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        down = torch.bmm(self._stacked(x), self._lora_A().mT) * self._scales(x)
        self._add(out, down, self._lora_B().mT)
        return down

    def backward(self, grad: Tensor, grad_x: Tensor | None) -> Tensor:
        grad_down = torch.bmm(self._stacked(grad), self._lora_B()) * self._scales(grad)
        if grad_x is not None:
            self._add(grad_x, grad_down, self._lora_A())
        return grad_down

    def own_gradients(self, grad: Tensor, x: Tensor, down: Tensor, grad_down: Tensor) -> Iterator[Sequence[Tensor]]:
        of_A = torch.bmm(grad_down.mT, self._stacked(x))
        of_B = torch.bmm(down.mT, self._stacked(grad)).mT
        return zip(of_A.unbind(), of_B.unbind(), strict=True)

    def _stacked(self, x: Tensor) -> Tensor:
        """Return `[groups, part, d]`, with zeros after each group's rows. The result may be a view."""
        in_place = self._in_place(x)
        return self._copied(x) if in_place is None else in_place

    def _in_place(self, x: Tensor) -> Tensor | None:
        """Return a view `[groups, part, d]` if the groups are full, otherwise None.

        BLAS may choose its kernel by alignment, so the view must be aligned like new memory.
        """
        if not self.are_full:
            return None
        rows = x[self.spans[0].start : self.spans[-1].end]
        is_like_new = rows.is_contiguous() and rows.data_ptr() % ALIGNMENT_BYTES == 0
        return rows.view(len(self.spans), self.part, -1) if is_like_new else None

    def _copied(self, x: Tensor) -> Tensor:
        stacked = pad_sequence([span.of(x) for span in self.spans], batch_first=True)
        missing = self.part - stacked.shape[1]
        return functional.pad(stacked, (0, 0, 0, missing)) if missing else stacked

    def _add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        in_place = self._in_place(out)
        if in_place is not None:
            in_place.baddbmm_(left, right)
            return
        sums = self._copied(out).baddbmm_(left, right)
        for span, own in zip(self.spans, sums.unbind(), strict=True):
            span.of(out).copy_(own[: span.tokens])

    def _lora_A(self) -> Tensor:
        return torch.stack([span.own.lora_A for span in self.spans])

    def _lora_B(self) -> Tensor:
        return torch.stack([span.own.lora_B for span in self.spans])

    def _scales(self, x: Tensor) -> Tensor:
        return x.new_tensor([span.own.scale for span in self.spans]).view(-1, 1, 1)


class _LoraLinearApart(torch.autograd.Function):
    """A LoRA layer and the frozen base in one function, so that each product adds to the previous result in place.

    One product over all rows would have another shape in another batch, and BLAS may then sum in another order. So each
    product takes a part with a fixed number of rows. The gradients of A and B are sums over a group, and each gradient
    is one product. All rows of a group belong to one call, so the gradients do not depend on other groups in the
    forward.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, base: nn.Linear, delta: DeltasApart, *adapters: Tensor) -> Tensor:
        out = product_by_parts(x, base.weight, base.bias, delta.product_tokens)
        ctx.batches = delta.batches(x)
        ctx.part = delta.product_tokens
        downs = [batch.forward(x, out) for batch in ctx.batches]
        ctx.base = base  # a quantized weight is unpacked only while it is used
        ctx.save_for_backward(x, *downs)
        return out.data  # not a view of padded memory: models add to the result in place

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *downs = ctx.saved_tensors
        needs_x, needs_adapters = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        grad = grad.contiguous()
        grad_x = product_by_parts(grad, ctx.base.weight.T, None, ctx.part) if needs_x else None
        grads: list[Tensor | None] = [None] * len(needs_adapters)
        for batch, down in zip(ctx.batches, downs, strict=True):
            grad_down = batch.backward(grad, grad_x)
            if any(needs_adapters):
                own_gradients = batch.own_gradients(grad, x, down, grad_down)
                for place, (grad_A, grad_B) in zip(batch.places, own_gradients, strict=True):
                    grads[2 * place : 2 * place + 2] = grad_A, grad_B
        return grad_x, None, None, *grads


def module_family(name: str) -> str | None:
    """Return "attn", "mlp" or "unembed" for a linear layer that LoRA covers, otherwise None."""
    parts = name.split(".")
    if parts[-1] == UNEMBED_NAME:
        return "unembed"
    if parts[-1] in UNTRAINED_NAMES or UNTRAINED_PARENT in parts:
        return None
    if any(part in ATTENTION_PARENTS for part in parts[:-1]):
        return "attn"
    if any(part in MLP_PARENTS for part in parts[:-1]):
        return "mlp"
    if MIXER_PARENT in parts[:-1]:
        return "mlp" if parts[-1] in MLP_NAMES else "attn"
    return None


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a linear layer computes the output like an ordinary linear layer.

    Some subclasses split the weight into groups.
    """
    return type(module).forward is nn.Linear.forward


def wrap_linears(model: nn.Module) -> dict[str, StackedLoraLinear]:
    """Replace every linear layer by a wrapper, and return the wrappers by name, in model order.

    Layers that LoRA does not cover (`module_family` is None) are wrapped, too, because these layers need separate
    products.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) or hasattr(module, "quantized")
    }
    wrapped = {}
    for name, linear in found.items():
        parent_name, _, child = name.rpartition(".")
        layer = StackedLoraLinear(linear, name)
        setattr(model.get_submodule(parent_name), child, layer)
        wrapped[name] = layer
    return wrapped
