"""Hidden states, targets and output projections of every kind, and what their logprobs have to be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tinsmith_trainer.engines.base import LossKernel
from tinsmith_trainer.engines.peft.logprobs import PLAIN, target_logprobs
from tinsmith_trainer.torch_model.architecture import LogitTransform
from tinsmith_trainer.torch_model.device import WarmMemory
from tinsmith_trainer.torch_model.lora import OwnDelta, StackedLoraLinear
from torch import Tensor, nn

AMPLE = 2**30
RELATIVE_ROUNDING = 1e-5
ROUNDING = {torch.float32: RELATIVE_ROUNDING, torch.float64: RELATIVE_ROUNDING, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """Tensors drawn from a seed; `rank` 0 is a projection without a LoRA. `spread` is about that of the logits."""

    tokens: int = 24
    hidden_size: int = 16
    vocab_size: int = 300
    rank: int = 4
    targets: int = 1
    bias: bool = False
    spread: float = 3.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    transform: LogitTransform = PLAIN

    def drawn(self) -> tuple[Tensor, Tensor, StackedLoraLinear, OwnDelta | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        head = nn.Linear(self.hidden_size, self.vocab_size, bias=self.bias).requires_grad_(False)
        head.weight.copy_(normal(self.vocab_size, self.hidden_size) * self.spread / self.hidden_size**0.5)
        if self.bias:
            head.bias.copy_(normal(self.vocab_size))
        hidden = normal(self.tokens, self.hidden_size).to(self.dtype).requires_grad_()
        targets = torch.randint(self.vocab_size, (self.tokens, self.targets), generator=generator)
        delta = None
        if self.rank:
            lora_A = normal(self.rank, self.hidden_size).requires_grad_()
            delta = OwnDelta(lora_A, normal(self.vocab_size, self.rank).mul_(0.1).requires_grad_(), 0.5)
        return hidden, targets, StackedLoraLinear(head.to(self.dtype), "lm_head"), delta


def logprobs_of(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: OwnDelta | None,
    *,
    product_tokens: int | None = None,
    byte_budget: int = AMPLE,
    kernel: LossKernel = "torch",
    transform: LogitTransform = PLAIN,
    memory: WarmMemory | None = None,
) -> Tensor:
    """Return the logprobs, computed by products of all tokens unless stated otherwise."""
    return target_logprobs(
        hidden,
        targets,
        head,
        delta,
        product_tokens=product_tokens or len(hidden),
        byte_budget=byte_budget,
        kernel=kernel,
        transform=transform,
        memory=memory,
    )


def expected(
    hidden: Tensor, targets: Tensor, head: StackedLoraLinear, delta: OwnDelta | None, transform: LogitTransform = PLAIN
) -> Tensor:
    """Return the logprobs of the textbook formula in float64."""
    logits = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    if delta is not None:
        logits = logits + hidden.double() @ delta.lora_A.double().T @ delta.lora_B.double().T * delta.scale
    logits = logits * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    return logits.log_softmax(-1).gather(-1, targets)


def leaves(hidden: Tensor, delta: OwnDelta | None) -> list[Tensor]:
    return [hidden] if delta is None else [hidden, delta.lora_A, delta.lora_B]


def some_loss(logprobs: Tensor) -> Tensor:
    """Return a loss that has a gradient of its own, of either sign, for each logprob."""
    weights = torch.linspace(-1.0, 2.0, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    return (logprobs * weights).sum() + logprobs.square().sum() / 20


def assert_alike(
    case: Case, byte_budget: int = AMPLE, product_tokens: int | None = None, kernel: LossKernel = "torch"
) -> None:
    """Ours, and their gradients, are those of a plain log-softmax."""
    hidden, targets, head, delta = case.drawn()
    found = logprobs_of(
        hidden,
        targets,
        head,
        delta,
        product_tokens=product_tokens,
        byte_budget=byte_budget,
        kernel=kernel,
        transform=case.transform,
    )
    plain = expected(hidden, targets, head, delta, case.transform)

    assert found.dtype == torch.float32
    rounding = ROUNDING[case.dtype] * max(1.0, case.spread)
    torch.testing.assert_close(found.double(), plain, rtol=rounding, atol=rounding)
    gradients = torch.autograd.grad(some_loss(found), leaves(hidden, delta))
    for gradient, same in zip(gradients, torch.autograd.grad(some_loss(plain), leaves(hidden, delta)), strict=True):
        # Where a target has nearly all of the probability, terms of the projection's own size cancel.
        atol = rounding * max(1.0, float(same.abs().max()))
        torch.testing.assert_close(gradient.double(), same.double(), rtol=0, atol=atol)
