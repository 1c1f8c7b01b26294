"""Logprobs of targets on the CPU, by tiles of logits that never leave the caches.

A tile holds the logits of a block of tokens for a stretch of the vocabulary. Its exponentials are summed, and
multiplied with the projection's rows while they are there: the average row under a token's distribution is all that
its hidden state's gradient needs, whatever the loss is. So no logits are kept, and of backward only the gradient of
the projection's LoRA needs them once more. Computing them again is cheaper than touching new memory for them:
measured at 1024 tokens and 51,200 ids, 50 ms against 90 ms.

A factor of the logits goes into what the rows are multiplied with. A soft cap's slope goes into the average: a row
counts by its probability, and by how much its logit still moves.

Exponentials are powers of 2, which PyTorch takes four times as fast as those of e.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith_trainer.torch_model.logits import LogitTransform
from tinsmith_trainer.torch_model.lora import OwnDelta, StackedLoraLinear
from tinsmith_trainer.torch_model.products import filled_up, linear_product
from tinsmith_trainer.torch_model.rows import whole_vector_pieces

BLOCK_TOKENS = 2048
TILE_LOGITS = 2**18
"""A tile of 1 MiB. Each is gone before the next is made, so that malloc hands out the same warm memory again; it gives
larger ones back to the system in between, whose pages cost as much as the products."""
LOG2_E = 1 / math.log(2)


def tiled_target_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: OwnDelta | None,
    product_tokens: int,
    transform: LogitTransform,
) -> Tensor:
    """Logprobs `[tokens, K]` of targets `[tokens, K]`, for hidden states `[tokens, d]`; float32 on the CPU.

    A product takes `product_tokens`; the last ones are filled up to that.
    """
    tokens = -(-len(hidden) // product_tokens) * product_tokens
    inputs = _inputs(filled_up(hidden, tokens), head, delta, product_tokens)
    if transform.scale != 1.0:
        inputs = inputs * transform.scale
    targets_of_all = filled_up(targets, tokens)
    lora_B = None if delta is None else delta.lora_B
    trains = torch.is_grad_enabled() and inputs.requires_grad
    part = tokens_per_block(product_tokens)
    block = part * max(1, BLOCK_TOKENS // part)
    parts = [
        _TargetLogprobs.apply(some_inputs, lora_B, head.weight, head.bias, some_targets, part, trains, transform.cap)
        for some_inputs, some_targets in zip(
            torch.split(inputs, block), torch.split(targets_of_all, block), strict=True
        )
    ]
    return torch.cat(parts)[: len(hidden)]


def tokens_per_block(tokens: int) -> int:
    """Half of half of a row, until a block is small."""
    while tokens > BLOCK_TOKENS and tokens % 2 == 0:
        tokens //= 2
    return tokens


def _inputs(hidden: Tensor, head: StackedLoraLinear, delta: OwnDelta | None, product_tokens: int) -> Tensor:
    """What the projection's rows are multiplied with: hidden states, the LoRA's inner values, and 1 for the bias."""
    parts = [hidden]
    if delta is not None:
        downs = [part @ delta.lora_A.T * delta.scale for part in torch.split(hidden, product_tokens)]
        parts.append(torch.cat(downs))
    if head.bias is not None:
        parts.append(hidden.new_ones((len(hidden), 1)))
    return torch.cat(parts, 1)


@dataclass(frozen=True, slots=True)
class _Projection:
    """A row for each id: the weight's, then that of the LoRA's B, then the bias."""

    weight: Tensor
    lora_B: Tensor | None  # noqa: N815
    bias: Tensor | None

    def rows(self, ids: slice | Tensor) -> Tensor:
        parts = [self.weight[ids]]
        if self.lora_B is not None:
            parts.append(self.lora_B[ids])
        if self.bias is not None:
            parts.append(self.bias[ids].unsqueeze(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def tiles(self, tokens: int) -> Iterator[tuple[slice, Tensor]]:
        """Stretches of ids and their rows."""
        width = max(1, TILE_LOGITS // tokens)
        for start in range(0, len(self.weight), width):
            ids = slice(start, min(start + width, len(self.weight)))
            yield ids, self.rows(ids)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        inputs: Tensor,
        lora_B: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        part: int,
        trains: bool,
        cap: float | None,
    ) -> Tensor:
        projection = _Projection(weight, lora_B, bias)
        sums = [_Sums(some_inputs, cap, averaged=trains) for some_inputs in torch.split(inputs, part)]
        for _, rows in projection.tiles(part):
            for own in sums:
                own.add(rows)
        log2_sums = torch.cat([own.log2() for own in sums])
        if trains:
            averages = torch.cat([own.average() for own in sums])
            ctx.save_for_backward(inputs, lora_B, weight, bias, targets, log2_sums, averages)
            ctx.cap = cap
        logits = _target_logits(inputs, projection, targets, cap)
        # A target's logit and the sum that holds it are rounded apart.
        return logits.sub_(log2_sums / LOG2_E).clamp_(max=0.0)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, lora_B, weight, bias, targets, log2_sums, averages = ctx.saved_tensors
        projection = _Projection(weight, lora_B, bias)
        grad_inputs = averages * -grad.sum(1, keepdim=True)
        of_targets = grad
        if ctx.cap is not None:
            of_targets = grad * _slopes(_target_logits(inputs, projection, targets, ctx.cap), ctx.cap)
        for ids, own in zip(targets.unbind(1), torch.split(of_targets, 1, 1), strict=True):
            grad_inputs.addcmul_(projection.rows(ids), own)
        grad_B = None
        if ctx.needs_input_grad[1]:
            grad_B = _grad_B(inputs, projection, targets, log2_sums, grad, of_targets, ctx.cap)
        return grad_inputs, grad_B, None, None, None, None, None, None


def _exp2(exponents: Tensor) -> Tensor:
    """In place."""
    for piece in _pieces(exponents):
        piece.exp2_()
    return exponents


def _capped(logits: Tensor, cap: float) -> Tensor:
    """In place, in the unit of both."""
    for piece in _pieces(logits):
        piece.div_(cap).tanh_().mul_(cap)
    return logits


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Flat views of all of it, in which a logit's bits do not depend on its token's place in the block."""
    flat = tensor.view(-1)
    return torch.split(flat, whole_vector_pieces(len(flat)))


def _slopes(capped: Tensor, cap: float) -> Tensor:
    """How much of a change of a logit the cap leaves: 1 - tanh², from what the cap made of it, in the unit of both."""
    return 1 - (capped / cap).square()


def _target_logits(inputs: Tensor, projection: _Projection, targets: Tensor, cap: float | None) -> Tensor:
    """`[tokens, K]`."""
    logits = torch.stack([(inputs * projection.rows(ids)).sum(1) for ids in targets.unbind(1)], 1)
    return logits if cap is None else _capped(logits, cap)


class _Sums:
    """Over the tiles so far, relative to each token's largest logit among them: of powers, and of rows by powers."""

    def __init__(self, inputs: Tensor, cap: float | None, *, averaged: bool) -> None:
        self._scaled = inputs * LOG2_E
        self._cap = None if cap is None else cap * LOG2_E
        self._largest = torch.full((len(inputs), 1), -torch.inf)
        self._powers = torch.zeros_like(self._largest)
        self._rows = torch.zeros_like(inputs) if averaged else None

    def add(self, rows: Tensor) -> None:
        exponents = linear_product(self._scaled, rows)
        slopes = None
        if self._cap is not None:
            slopes = _slopes(_capped(exponents, self._cap), self._cap)
        largest = torch.maximum(self._largest, exponents.amax(1, keepdim=True))
        powers = _exp2(exponents.sub_(largest))
        shrink = self._largest.sub_(largest).exp2_()
        self._powers.mul_(shrink).add_(powers.sum(1, keepdim=True))
        if self._rows is not None:
            if slopes is not None:
                powers = powers.mul_(slopes)
            torch.addcmul(linear_product(powers, rows.T), self._rows, shrink, out=self._rows)
        self._largest = largest

    def log2(self) -> Tensor:
        """Of the sum of exponentials `[tokens, 1]`."""
        return self._largest + self._powers.log2()

    def average(self) -> Tensor:
        """The average row under each token's distribution, each by its logit's slope, where that was asked for."""
        assert self._rows is not None
        return self._rows / self._powers


def _grad_B(
    inputs: Tensor,
    projection: _Projection,
    targets: Tensor,
    log2_sums: Tensor,
    grad: Tensor,
    of_targets: Tensor,
    cap: float | None,
) -> Tensor:
    """The gradient of the LoRA's B, from the logits computed anew; `of_targets` is that of the targets' raw logits."""
    assert projection.lora_B is not None
    grad_B = torch.empty_like(projection.lora_B)
    inner = inputs.narrow(1, projection.weight.shape[1], grad_B.shape[1])
    scaled = inputs * LOG2_E
    weighted = (inner * -grad.sum(1, keepdim=True)).T.contiguous()
    for ids, rows in projection.tiles(len(inputs)):
        grad_B[ids] = _grad_B_of(rows, scaled, log2_sums, weighted, cap)
    for target_ids, own in zip(targets.unbind(1), torch.split(of_targets, 1, 1), strict=True):
        grad_B.index_add_(0, target_ids, inner * own)
    return grad_B


def _grad_B_of(rows: Tensor, scaled: Tensor, log2_sums: Tensor, weighted: Tensor, cap: float | None) -> Tensor:
    """Of one tile, without what its targets add."""
    exponents = linear_product(scaled, rows)
    slopes = None
    if cap is not None:
        slopes = _slopes(_capped(exponents, cap * LOG2_E), cap * LOG2_E)
    probabilities = _exp2(exponents.sub_(log2_sums))
    if slopes is not None:
        probabilities.mul_(slopes)
    return linear_product(weighted, probabilities.T).T
