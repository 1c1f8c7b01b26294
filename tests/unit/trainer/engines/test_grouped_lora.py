"""Grouped products of several adapters are the products of each adapter alone, forward and backward."""

from __future__ import annotations

import pytest
import torch
from support.engine.like_gpu import grouped_experts
from tinsmith_trainer.engines.peft import grouped_lora
from tinsmith_trainer.engines.peft.grouped_lora import GroupedDeltas, TokenGroups, TrainedDelta
from torch import Tensor, nn

WIDE, NARROW = 24, 16
SIZES, RANKS, SCALES = (5, 1, 7, 3), (4, None, 9, 1), (2.0, 1.0, 0.5, 3.0)
"""The second adapter does not change the layer."""


def deltas(dtype: torch.dtype) -> tuple[TrainedDelta | None, ...]:
    generator = torch.Generator().manual_seed(3)

    def drawn(rank: int | None, scale: float) -> TrainedDelta | None:
        if rank is None:
            return None
        lora_A, lora_B = (torch.randn(s, generator=generator) for s in ((rank, WIDE), (NARROW, rank)))
        return TrainedDelta(
            lora_A.to(dtype), lora_B.to(dtype), scale, torch.zeros_like(lora_A), torch.zeros_like(lora_B)
        )

    return tuple(drawn(rank, scale) for rank, scale in zip(RANKS, SCALES, strict=True))


def plain(x: Tensor, base: nn.Linear, adapters: tuple[TrainedDelta | None, ...], upstream: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of x and of all A and B, by autograd for each adapter alone."""
    leaves, outs = [], []
    for part, delta in zip(torch.split(x, SIZES), adapters, strict=True):
        own = base(part)
        if delta is not None:
            lora_A, lora_B = (tensor.detach().float().requires_grad_() for tensor in (delta.lora_A, delta.lora_B))
            leaves += [lora_A, lora_B]
            own = own + delta.scale * (part @ lora_A.T) @ lora_B.T
        outs.append(own)
    out = torch.cat(outs)
    return [out, *torch.autograd.grad(out, [x, *leaves], upstream)]


@pytest.mark.parametrize("gradient_bytes", [grouped_lora.GRADIENT_BYTES, 1], ids=["at once", "in parts"])
@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_adapters_of_other_ranks_scales_and_layers_share_products(
    kernel: str, dtype: torch.dtype, rounding: float, gradient_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_lora, "GRADIENT_BYTES", gradient_bytes)
    torch.manual_seed(1)
    base = nn.Linear(WIDE, NARROW).to(dtype).requires_grad_(False)
    x, upstream = torch.randn((sum(SIZES), WIDE)).to(dtype), torch.randn((sum(SIZES), NARROW)).to(dtype)
    adapters = deltas(dtype)
    expected = plain(x.float().requires_grad_(), base.float(), adapters, upstream.float())
    base.to(dtype)
    x.requires_grad_()
    groups = TokenGroups.of(SIZES, SCALES, x.detach(), trains=True)
    with grouped_experts() if kernel == "grouped" else torch.enable_grad():
        out = GroupedDeltas(groups, adapters)(x.unsqueeze(0), base).squeeze(0)
        out.backward(upstream)
    assert x.grad is not None
    memory = [grad for delta in adapters if delta is not None for grad in (delta.grad_A, delta.grad_B)]
    for found, other in zip([out, x.grad, *memory], expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found.float(), other, rtol=0, atol=rounding * float(other.detach().abs().max()))
    assert all(grad is not None and grad.dtype == torch.float32 for grad in memory)


def test_gradients_are_added_to_those_of_earlier_microbatches_and_need_no_gradient_of_the_input() -> None:
    base, adapters = nn.Linear(WIDE, NARROW).requires_grad_(False), deltas(torch.float32)
    x = torch.randn((sum(SIZES), WIDE))
    layer = GroupedDeltas(TokenGroups.of(SIZES, SCALES, x, trains=True), adapters)
    seen = []
    for _ in range(2):
        layer(x, base).sum().backward()
        seen.append([delta.grad_B.clone() for delta in adapters if delta is not None and delta.grad_B is not None])
    for first, second in zip(*seen, strict=True):
        torch.testing.assert_close(second, 2 * first)


def test_a_layer_of_some_tokens_has_the_delta_of_a_single_adapter_and_refuses_several() -> None:
    base, adapters = nn.Linear(WIDE, NARROW).requires_grad_(False), deltas(torch.float32)
    some = torch.randn((3, WIDE))
    [first, *_] = adapters
    assert first is not None
    alone = GroupedDeltas(TokenGroups.of([7], [first.scale], some, trains=False), (first,))
    torch.testing.assert_close(alone(some, base), base(some) + first.scale * (some @ first.lora_A.T) @ first.lora_B.T)
    several = GroupedDeltas(TokenGroups.of(SIZES, SCALES, some, trains=False), adapters)
    with pytest.raises(ValueError, match="which adapters they belong to"):
        several(some, base)


def test_a_forward_without_training_records_nothing() -> None:
    base, adapters = nn.Linear(WIDE, NARROW).requires_grad_(False), deltas(torch.float32)
    x = torch.randn((sum(SIZES), WIDE))
    out = GroupedDeltas(TokenGroups.of(SIZES, SCALES, x, trains=False), adapters)(x, base)
    assert not out.requires_grad
