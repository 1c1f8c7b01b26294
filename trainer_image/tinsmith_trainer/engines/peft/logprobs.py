"""Logprobs of targets from hidden states, without ever holding more logits than a byte budget allows.

On the CPU in float32 they are held in warm memory alone. Elsewhere the device's own kernels are fast enough to hold
new memory full of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinsmith_trainer.engines.base import LossKernel
from tinsmith_trainer.engines.peft.loss_kernels import bytes_per_logit, logprobs_of_logits
from tinsmith_trainer.engines.peft.vocabulary_tiles import tiled_target_logprobs
from tinsmith_trainer.torch_model.logits import LogitTransform
from tinsmith_trainer.torch_model.lora import DeltasApart, OwnDelta, StackedLoraLinear, apply_delta
from tinsmith_trainer.torch_model.warm_memory import WarmMemory

PLAIN = LogitTransform()


def target_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: OwnDelta | None,
    *,
    product_tokens: int | None,
    byte_budget: int,
    kernel: LossKernel = "torch",
    transform: LogitTransform = PLAIN,
    memory: WarmMemory | None = None,
) -> Tensor:
    """Float32 logprobs `[tokens, K]` of int64 targets `[tokens, K]`, for hidden states `[tokens, d]` of one adapter.

    On the CPU in float32 a product takes `product_tokens` at a time, all at once if None, and its shape is all that a
    token's bits depend on; what is left of `memory` saves it from computing logits twice. Elsewhere `kernel` makes
    logprobs of logits. `transform` is what becomes of these first.
    """
    if hidden.device.type == "cpu" and hidden.dtype == head.weight.dtype == torch.float32:
        part = product_tokens or len(hidden)
        return tiled_target_logprobs(hidden, targets, head, delta, part, transform, memory or WarmMemory())
    per_logit = bytes_per_logit(kernel, hidden.dtype, transform)
    chunk = tokens_per_chunk(len(hidden), head.out_features * per_logit, byte_budget)
    if chunk >= len(hidden):
        return _head_logprobs(hidden, targets, head, delta, kernel, transform)
    parts = [
        checkpoint(_head_logprobs, hidden_part, target_part, head, delta, kernel, transform, use_reentrant=False)
        for hidden_part, target_part in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.cat(parts)


def tokens_per_chunk(tokens: int, bytes_per_token: int, byte_budget: int) -> int:
    """All of them if their logits fit, else as many as do, at least one."""
    return min(tokens, max(1, byte_budget // bytes_per_token))


def _head_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: OwnDelta | None,
    kernel: LossKernel,
    transform: LogitTransform,
) -> Tensor:
    logits = apply_delta(hidden.unsqueeze(0), head.base, DeltasApart((delta,), (len(hidden),), None)).squeeze(0)
    return logprobs_of_logits(transform(logits), targets, kernel)
