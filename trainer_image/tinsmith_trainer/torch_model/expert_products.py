"""Products of tokens with the weights of their experts.

On the CPU each product takes a fixed number of one expert's tokens, padded with zeros, and the results of a token's
experts are summed in order. So a token's bits do not depend on the routing of other tokens. On a GPU one grouped
product covers all experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from tinsmith_trainer.torch_model.products import linear_product, product_by_parts

PRODUCT_TOKENS = 16
"""The number of tokens of a product.

If 1,024 tokens use 8 of 128 experts each, an expert gets 64 tokens; for 32 decoded tokens, it gets 2.
"""
ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """The experts of each token, and the order of all rows sorted by expert.

    A row is a token at one of its k experts. `chosen` `[tokens, k]` are the experts of each token. Rows are counted
    token by token. `order[i]` is the row at place i of the sorted rows; `inverse` is the inverse permutation.
    `counts[e]` is the number of rows of expert e.
    """

    chosen: Tensor
    order: Tensor
    inverse: Tensor
    counts: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Assignment:
        """Build an assignment from the experts of each token, `[tokens, k]`."""
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
        """The expert of each sorted row, `[rows]`."""
        return self.chosen.reshape(-1)[self.order]

    def to_experts(self, x: Tensor) -> Tensor:
        """Return `[rows, d]`, sorted by expert, from `[tokens, d]`."""
        rows: Tensor = _ToExperts.apply(x, self)
        return rows

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum each token's sorted rows `[rows, d]` with its weights `[tokens, k]`, to `[tokens, d]`."""
        by_token: Tensor = _Permuted.apply(rows, self.inverse, self.order)
        return _sum_of_choices(by_token.view(self.tokens, self.choices, -1) * weights.unsqueeze(-1))

    def part(self, start: int, end: int) -> tuple[Assignment, Tensor]:
        """Return the assignment of tokens `start` to `end`, and the positions of its rows among all rows."""
        if end - start == self.tokens:
            return self, torch.arange(len(self.order), device=self.order.device)
        own = Assignment.of(self.chosen[start:end], len(self.counts))
        return own, self.inverse[start * self.choices : end * self.choices][own.order]


@dataclass(frozen=True, slots=True)
class FrozenWeight:
    """The quantized weight of all experts. It is unpacked for each product, and the unpacked weight is not kept.

    `quantized` is a QuantizedWeight in the layout that its module uses.
    """

    quantized: Any
    is_transposed: bool

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.quantized.dtype
        return dtype

    def dense(self) -> Tensor:
        """Return `[experts, d_out, d_in]`."""
        weight: Tensor = self.quantized.dense()
        return weight.mT if self.is_transposed else weight


def by_expert(x: Tensor, weight: Tensor | FrozenWeight, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight: x `[rows, d_in]` sorted by expert, weight `[experts, d_out, d_in]`.

    The product is computed in the dtype of the weight.
    """
    if not isinstance(weight, Tensor):
        frozen: Tensor = _FrozenGroupedProduct.apply(x.to(weight.dtype), weight, counts)
        return frozen
    product: Tensor = _GroupedProduct.apply(x.to(weight.dtype), weight, counts)
    return product


def by_all(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply all rows by one weight `[1, d_out, d_in]`."""
    return by_expert(x, weight, torch.full((1,), len(x), device=x.device))


def _sum_of_choices(x: Tensor) -> Tensor:
    """Sum `[tokens, k, d]` over k in order. A reduction might add in another order for other shapes."""
    total = x[:, 0]
    for choice in range(1, x.shape[1]):
        total = total + x[:, choice]
    return total


class _Permuted(torch.autograd.Function):
    """`x[order]`. Its backward is a permutation, too. The backward of an index operation would accumulate."""

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
        return grouped_by_rows(x, weight, counts)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grouped_by_rows(grad, weight.mT, counts) if ctx.needs_input_grad[0] else None
        grad_weight = grouped_by_tokens(grad, x, weight, counts) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _FrozenGroupedProduct(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, counts: Tensor) -> Tensor:
        ctx.weight, ctx.counts = weight, counts
        return grouped_by_rows(x, weight.dense(), counts)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grouped_by_rows(grad.contiguous(), ctx.weight.dense().mT, ctx.counts), None, None


# Missing before PyTorch 2.10.
HAS_GROUPED_PRODUCTS = hasattr(functional, "grouped_mm")


def takes_all_at_once(x: Tensor) -> bool:
    """Return whether one grouped product covers all experts. This is faster on a GPU."""
    return HAS_GROUPED_PRODUCTS and x.device.type != "cpu"


def grouped_by_rows(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group's rows of x `[rows, d_in]` by its weight of `[groups, d_out, d_in]`. Records no gradient."""
    if len(weight) == 1:
        return linear_product(x, weight[0])
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


def grouped_by_tokens(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient of the weights, `[groups, d_out, d_in]`, with zeros for groups without rows."""
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
    """Multiply with the smaller dimension first. In the other order, MKL takes several times as long for a low rank."""
    if grad.shape[1] <= rows.shape[1]:
        return linear_product(grad.T, rows.T)
    return linear_product(rows.T, grad.T).T


def _aligned(x: Tensor, *dimensions: int) -> Tensor:
    """Pad dimensions with zeros to multiples of 16 bytes. `grouped_mm` requires this of strides."""
    floats = ALIGNED_BYTES // x.itemsize
    for dimension in dimensions:
        if missing := -x.shape[dimension] % floats:
            x = functional.pad(x, (0, 0) * (-1 - dimension) + (0, missing))
    return x


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)
