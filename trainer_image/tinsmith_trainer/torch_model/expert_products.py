"""Products of tokens with the weights of the experts they were sent to.

On the CPU each takes a fixed number of one expert's tokens, filled up with zeros, and sums over a token's experts go in
their order: a token's bits do not depend on what others were sent where. On a GPU it is one grouped product for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from tinsmith_trainer.torch_model.products import linear_product, product_by_parts

PRODUCT_TOKENS = 16
"""Of 1,024 tokens on 8 of 128 experts, 64 come to each; of 32 that are decoded, 2."""
ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which experts each token was sent to, and the order in which all their rows lie behind one another.

    A row is a token at one of its k experts. `chosen` `[tokens, k]`: those experts; `order[i]`: which row, counted
    token by token, is the i-th of those sorted by expert; `inverse`: the other way round; `counts[e]`: how many an
    expert has.
    """

    chosen: Tensor
    order: Tensor
    inverse: Tensor
    counts: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Assignment:
        """From the experts of each token `[tokens, k]`."""
        flat = chosen.reshape(-1).long()
        order = torch.argsort(flat, stable=True)
        rows = torch.arange(len(flat), device=flat.device)
        counts = torch.zeros(experts, dtype=torch.long, device=flat.device)
        return cls(
            chosen,
            order,
            torch.empty_like(order).scatter_(0, order, rows),
            counts.scatter_add_(0, flat, torch.ones_like(flat)),
        )

    @property
    def tokens(self) -> int:
        return self.chosen.shape[0]

    @property
    def choices(self) -> int:
        return self.chosen.shape[1]

    @property
    def experts(self) -> Tensor:
        """Of each sorted row, `[rows]`."""
        return self.chosen.reshape(-1)[self.order]

    def to_experts(self, x: Tensor) -> Tensor:
        """From `[tokens, d]` to `[rows, d]`, sorted by expert."""
        rows: Tensor = _ToExperts.apply(x, self)
        return rows

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Of each token's rows `[rows, d]`, sorted by expert, by its weights `[tokens, k]`: `[tokens, d]`."""
        by_token: Tensor = _Permuted.apply(rows, self.inverse, self.order)
        return _sum_of_choices(by_token.view(self.tokens, self.choices, -1) * weights.unsqueeze(-1))

    def part(self, start: int, end: int) -> tuple[Assignment, Tensor]:
        """Of tokens `start` to `end`: theirs alone, and where its rows lie among all."""
        if end - start == self.tokens:
            return self, torch.arange(len(self.order), device=self.order.device)
        own = Assignment.of(self.chosen[start:end], len(self.counts))
        return own, self.inverse[start * self.choices : end * self.choices][own.order]


class FrozenWeight(Protocol):
    """Of all experts `[experts, d_out, d_in]`, made dense for each product: never trained, and held by none."""

    @property
    def dtype(self) -> torch.dtype: ...
    def dense(self) -> Tensor: ...


def by_expert(x: Tensor, weight: Tensor | FrozenWeight, counts: Tensor) -> Tensor:
    """Each expert's rows times its weight: x `[rows, d_in]` sorted by expert, weight `[experts, d_out, d_in]`.

    Computed in the dtype of the weight.
    """
    if not isinstance(weight, Tensor):
        frozen: Tensor = _FrozenGroupedProduct.apply(x.to(weight.dtype), weight, counts)
        return frozen
    product: Tensor = _GroupedProduct.apply(x.to(weight.dtype), weight, counts)
    return product


def by_all(x: Tensor, weight: Tensor) -> Tensor:
    """All rows times one weight `[1, d_out, d_in]`."""
    return by_expert(x, weight, torch.tensor([len(x)], device=x.device))


def _sum_of_choices(x: Tensor) -> Tensor:
    """`[tokens, k, d]` over k, one after the other: a reduction might add in another order for other shapes."""
    total = x[:, 0]
    for choice in range(1, x.shape[1]):
        total = total + x[:, choice]
    return total


class _Permuted(torch.autograd.Function):
    """`x[order]`, whose backward is a permutation, too, where that of an index would add up."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[ctx.inverse], None, None


class _ToExperts(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        return x[assignment.order // assignment.choices]

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assignment: Assignment = ctx.assignment
        by_token = grad[assignment.inverse].view(assignment.tokens, assignment.choices, -1)
        return _sum_of_choices(by_token), None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _product(x, weight, counts)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _product(grad, weight.mT, counts) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, x, weight, counts) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _FrozenGroupedProduct(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, counts: Tensor) -> Tensor:
        ctx.weight, ctx.counts = weight, counts
        return _product(x, weight.dense(), counts)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _product(grad.contiguous(), ctx.weight.dense().mT, ctx.counts), None, None


# PyTorch before 2.10 has none.
HAS_GROUPED_PRODUCTS = hasattr(functional, "grouped_mm")


def takes_all_at_once(x: Tensor) -> bool:
    """Whether one grouped product serves all experts, which is the faster way on a GPU."""
    return HAS_GROUPED_PRODUCTS and x.device.type != "cpu"


def _product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if takes_all_at_once(x):
        whole = functional.grouped_mm(_aligned(x, -1), _aligned(weight, -1, -2).mT, offs=_ends(counts))
        return whole[:, : weight.shape[1]]
    sizes = counts.tolist()
    products = [
        product_by_parts(rows, weight[expert], None, PRODUCT_TOKENS)
        for expert, rows in enumerate(torch.split(x, sizes))
        if len(rows)
    ]
    return torch.cat(products) if products else x.new_empty((0, weight.shape[1]))


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`[experts, d_out, d_in]`; zeros for those that no row came to."""
    if takes_all_at_once(x):
        whole = functional.grouped_mm(_aligned(grad, -1).mT, _aligned(x, -1), offs=_ends(counts))
        return whole[:, : grad.shape[1], : x.shape[1]]
    sizes = counts.tolist()
    gradient = torch.zeros_like(weight)
    for expert, (own_grad, rows) in enumerate(zip(torch.split(grad, sizes), torch.split(x, sizes), strict=True)):
        if len(rows):
            gradient[expert] = _own_gradient(own_grad, rows)
    return gradient


def _own_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """The few columns come first: the other way round MKL takes several times as long for a low rank."""
    if grad.shape[1] <= rows.shape[1]:
        return linear_product(grad.T, rows.T)
    return linear_product(rows.T, grad.T).T


def _aligned(x: Tensor, *dimensions: int) -> Tensor:
    """Fill dimensions up with zeros to multiples of 16 bytes, which `grouped_mm` demands of strides."""
    floats = ALIGNED_BYTES // x.itemsize
    for dimension in dimensions:
        if missing := -x.shape[dimension] % floats:
            x = functional.pad(x, (0, 0) * (-1 - dimension) + (0, missing))
    return x


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)
