"""Logprobs of targets from hidden states, holding no more logits than a byte budget allows.

On the CPU in float32, logits are held in warm memory only (vocabulary_tiles.py). Elsewhere logits are computed in
chunks, and logprobs from logits by PyTorch's own operations, or on a GPU by Liger's kernel.

PyTorch's operations write float32 logprobs next to the logits, and read and write them again in backward: about 30
bytes of traffic per logit in bfloat16. Liger's kernel reads logits twice, keeps a float32 loss of each token, and
writes the gradient over the logits: 10 bytes. It takes logits as input, so an adapter of the output projection may have
changed them. Kernels that compute logits themselves would need the whole projection's gradient for that: see
docs/how-to/gpu.md.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tinsmith_trainer.engines.base import LossKernel
from tinsmith_trainer.engines.peft.grouped_lora import GroupedDeltas
from tinsmith_trainer.engines.peft.vocabulary_tiles import tiled_target_logprobs
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.torch_model.architecture import LogitTransform
from tinsmith_trainer.torch_model.device import WarmMemory
from tinsmith_trainer.torch_model.lora import DeltasApart, OwnDelta, StackedLoraLinear, apply_delta

log = structlog.get_logger(__name__)

FLOAT32_BYTES = 4
TRIAL_TOKENS, TRIAL_VOCABULARY = 16, 1000
TRIAL_TOLERANCE = 0.03
"""A tolerance for gradients of up to 2 in bfloat16, which each way rounds once or twice; wide for logprobs."""
NOT_IGNORED = -100
"""A value that no target has: the loss itself decides which targets count."""


def choose_loss_kernel(requested: LossKernel, device: torch.device, dtype: torch.dtype) -> LossKernel:
    """Return `torch` or `liger`. `auto` chooses Liger's kernel if it works here.

    Raises ServerError if `liger` is requested and does not work.
    """
    obstacle = None if requested == "torch" else _obstacle(device, dtype)
    if requested == "liger" and obstacle is not None:
        raise ServerError(f"--loss-kernel liger: {obstacle} Omit it, or use torch.")
    chosen: LossKernel = "torch" if requested == "torch" or obstacle is not None else "liger"
    log.info("chose the loss kernel", kernel=chosen, asked=requested, obstacle=obstacle)
    return chosen


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Liger's kernel cannot be used, as a sentence, or None if it runs and agrees."""
    if device.type != "cuda":
        return "it requires a GPU, and this worker uses the CPU."
    if find_spec("liger_kernel") is None:
        return "the Python package liger-kernel is not installed."
    try:
        difference = trial(device, dtype)
    except Exception as error:  # a compiler may raise anything for an unsupported device
        return f"Liger's kernel does not run on this GPU: {error}."
    if not difference <= TRIAL_TOLERANCE:  # also true for NaN
        return f"on this GPU Liger's kernel differs from PyTorch's operations by {difference:.3g}."
    return None


def trial(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between both ways, in logprobs and in gradients of either sign."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((TRIAL_TOKENS, TRIAL_VOCABULARY), generator=generator)
    targets = torch.randint(TRIAL_VOCABULARY, (TRIAL_TOKENS, 2), generator=generator).to(device)
    upstream = torch.linspace(-1.0, 1.0, targets.numel()).view(targets.shape).to(device)
    found = []
    for kernel in ("torch", "liger"):
        own = logits.to(device, dtype).requires_grad_()
        with torch.enable_grad():
            logprobs = logprobs_of_logits(own.clone(), targets, kernel)
        found.append((logprobs.detach(), torch.autograd.grad(logprobs, own, upstream)[0].detach().float()))
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def logprobs_of_logits(logits: Tensor, targets: Tensor, kernel: LossKernel) -> Tensor:
    """Return float32 `[tokens, K]` for int64 targets `[tokens, K]`. The logits may be overwritten."""
    function = _LigerLogprobs if kernel == "liger" else _GatheredLogSoftmax
    logprobs: Tensor = function.apply(logits, targets)
    return logprobs


def bytes_per_logit(kernel: LossKernel, logits_dtype: torch.dtype, transform: LogitTransform) -> int:
    """Return the bytes per logit held until backward, by the kernel and by a cap's hyperbolic tangent."""
    own = logits_dtype.itemsize if kernel == "liger" else FLOAT32_BYTES
    return own if transform.cap is None else own + logits_dtype.itemsize


class _GatheredLogSoftmax(torch.autograd.Function):
    """`log_softmax(logits)[targets]`, whose gradient is computed in one pass, without a dense tensor of zeros."""

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


class _LigerLogprobs(torch.autograd.Function):
    """Liger's kernel for one target per token. The others are derived, because they share a sum of exponentials."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        target_logits = logits.gather(-1, targets).float()  # before the gradient overwrites the logits
        losses, gradient = _losses_and_gradient(logits, targets[:, 0].contiguous(), trains=ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient, targets)
        return (target_logits - target_logits[:, :1] - losses.unsqueeze(1)).clamp_(max=0.0)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Scale the saved gradient, which is that of minus the first target's logprob. Backward runs once."""
        gradient, targets = ctx.saved_tensors
        sums = grad.sum(-1, keepdim=True)
        gradient.mul_(-sums)
        if targets.shape[1] > 1:
            of_targets = grad.clone()
            of_targets[:, :1] -= sums
            gradient.scatter_add_(-1, targets, of_targets.to(gradient.dtype))
        return gradient, None


def _losses_and_gradient(logits: Tensor, targets: Tensor, *, trains: bool) -> tuple[Tensor, Tensor]:
    """Return float32 cross-entropies `[tokens]` and their gradient with respect to the logits.

    If it `trains`, the gradient overwrites the logits.
    """
    import liger_kernel.functional  # noqa: F401 - registers the implementations
    from liger_kernel.backends import dispatch

    weights, smoothing, squared_sums, cap = None, 0.0, 0.0, None
    counts = (len(targets), float(len(targets)), 0.0)  # a mean would divide by them
    no_more_outputs = (False, False, False)
    losses, _, _, _, gradient = dispatch(
        "cross_entropy_loss_and_grad",
        *(
            logits,
            targets,
            weights,
            NOT_IGNORED,
            squared_sums,
            smoothing,
            "none",
            cap,
            *counts,
            *no_more_outputs,
            trains,
        ),
        impl="nvidia-triton",
    )
    return losses, gradient


PLAIN = LogitTransform()
Head = OwnDelta | GroupedDeltas | None
"""What adapters add to the output projection: the delta of all tokens, or of each group of tokens, or nothing."""


def takes_tiles(head: StackedLoraLinear) -> bool:
    """Return whether logprobs are computed by tiles of the vocabulary, which hold one adapter at a time."""
    return head.weight.device.type == "cpu" and head.weight.dtype == torch.float32


def target_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: Head,
    *,
    product_tokens: int | None,
    byte_budget: int,
    kernel: LossKernel = "torch",
    transform: LogitTransform = PLAIN,
    memory: WarmMemory | None = None,
) -> Tensor:
    """Return float32 logprobs `[tokens, K]` of int64 targets `[tokens, K]`.

    `hidden` are the states `[tokens, d]` of one adapter, or of the groups of GroupedDeltas. On the CPU in float32 a
    product takes `product_tokens` at a time, or all if None, and a token's bits depend only on that shape; free space
    of `memory` avoids computing logits twice. Elsewhere `kernel` computes logprobs from logits, and the logits of all
    groups together stay within the budget. `transform` is applied to the logits first.
    """
    if takes_tiles(head):
        assert not isinstance(delta, GroupedDeltas), "tiles hold one adapter"
        part = product_tokens or len(hidden)
        return tiled_target_logprobs(hidden, targets, head, delta, part, transform, memory or WarmMemory())
    per_logit = bytes_per_logit(kernel, hidden.dtype, transform)
    chunk = tokens_per_chunk(len(hidden), head.out_features * per_logit, byte_budget)
    if chunk >= len(hidden):
        return _head_logprobs(hidden, targets, head, delta, kernel, transform)
    parts = [
        checkpoint(
            _head_logprobs,
            hidden[start : start + chunk],
            targets[start : start + chunk],
            head,
            delta.part(start, start + chunk) if isinstance(delta, GroupedDeltas) else delta,
            kernel,
            transform,
            use_reentrant=False,
        )
        for start in range(0, len(hidden), chunk)
    ]
    return torch.cat(parts)


def tokens_per_chunk(tokens: int, bytes_per_token: int, byte_budget: int) -> int:
    """Return how many tokens' logits fit into the budget, at least one."""
    return min(tokens, max(1, byte_budget // bytes_per_token))


def _head_logprobs(
    hidden: Tensor, targets: Tensor, head: StackedLoraLinear, delta: Head, kernel: LossKernel, transform: LogitTransform
) -> Tensor:
    deltas = delta if isinstance(delta, GroupedDeltas) else DeltasApart((delta,), (len(hidden),), None)
    logits = apply_delta(hidden.unsqueeze(0), head.base, deltas).squeeze(0)
    return logprobs_of_logits(transform(logits), targets, kernel)
