"""Logprobs of targets from logits whose vocabulary is divided among tensor ranks."""

from __future__ import annotations

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor


def target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 of the targets' shape, differentiable, the same on all tensor ranks.

    `logits` are this rank's part, `[B, S, V/TP]`; entries of a padded vocabulary are -inf. `targets` `[B, S]` or
    `[B, S, K]` are ids of the whole vocabulary. Each rank's gradient is that of its part.
    """
    wanted = targets if targets.ndim == logits.ndim else targets.unsqueeze(-1)
    logits = logits.float()
    found = _target_logits(logits, wanted) - _log_total(logits).unsqueeze(-1)
    return found.view(targets.shape)


def _log_total(logits: Tensor) -> Tensor:
    """log(sum(exp)) over the whole vocabulary, `[B, S]`."""
    highest = logits.detach().amax(-1)
    torch.distributed.all_reduce(
        highest, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group()
    )
    total = (logits - highest.unsqueeze(-1)).exp().sum(-1)
    summed: Tensor = reduce_from_tensor_model_parallel_region(total)
    return summed.log() + highest


def _target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Each target's logit, from the rank that has it."""
    width = logits.shape[-1]
    own = targets - parallel_state.get_tensor_model_parallel_rank() * width
    is_here = (own >= 0) & (own < width)
    found = logits.gather(-1, own.clamp(0, width - 1))
    summed: Tensor = reduce_from_tensor_model_parallel_region(torch.where(is_here, found, 0.0))
    return summed
