"""Logprobs of targets from hidden states, without ever holding more logits than a byte budget allows.

On the CPU in float32 no logits are held at all. Elsewhere the device's own kernels are fast enough to hold them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tinsmith_trainer.engines.peft.vocabulary_tiles import tiled_target_logprobs
from tinsmith_trainer.torch_model.lora import DeltasApart, OwnDelta, StackedLoraLinear, apply_delta

FLOAT32_BYTES = 4


def target_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: OwnDelta | None,
    *,
    product_tokens: int | None,
    byte_budget: int,
) -> Tensor:
    """Float32 logprobs `[tokens, K]` of int64 targets `[tokens, K]`, for hidden states `[tokens, d]` of one adapter.

    On the CPU in float32 a product takes `product_tokens` at a time, all at once if None, and its shape is all that a
    token's bits depend on.
    """
    if hidden.device.type == "cpu" and hidden.dtype == head.weight.dtype == torch.float32:
        return tiled_target_logprobs(hidden, targets, head, delta, product_tokens or len(hidden))
    chunk = tokens_per_chunk(len(hidden), head.out_features, byte_budget)
    if chunk >= len(hidden):
        return _head_logprobs(hidden, targets, head, delta)
    parts = [
        checkpoint(_head_logprobs, hidden_part, target_part, head, delta, use_reentrant=False)
        for hidden_part, target_part in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.cat(parts)


def tokens_per_chunk(tokens: int, vocab_size: int, byte_budget: int) -> int:
    """All of them if their float32 logits fit, else as many as do, at least one."""
    return min(tokens, max(1, byte_budget // (vocab_size * FLOAT32_BYTES)))


def _head_logprobs(hidden: Tensor, targets: Tensor, head: StackedLoraLinear, delta: OwnDelta | None) -> Tensor:
    logits = apply_delta(hidden.unsqueeze(0), head.base, DeltasApart((delta,), (len(hidden),), None)).squeeze(0)
    logprobs: Tensor = _GatheredLogSoftmax.apply(logits, targets)
    return logprobs


class _GatheredLogSoftmax(torch.autograd.Function):
    """`log_softmax(logits)[targets]`; its gradient is made in one pass, with no dense tensor of zeros."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(logprobs, targets)
        ctx.logits_dtype = logits.dtype
        return logprobs.gather(-1, targets)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logprobs, targets = ctx.saved_tensors
        grad_logits = logprobs.exp().mul_(-grad.sum(-1, keepdim=True)).scatter_add_(-1, targets, grad)
        return grad_logits.to(ctx.logits_dtype), None
