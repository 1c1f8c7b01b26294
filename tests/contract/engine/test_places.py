"""On a GPU, and on its path on a CPU, the PEFT engine trains as on the CPU: also experts, and layers computed again."""

from __future__ import annotations

import sys

import pytest
import torch
from support.engine.datums import sft_datum
from support.engine.peft import assert_alike
from support.engine.like_gpu import grouped_experts
from support.engine.places import Place, in_place_of_a_gpu, peft_engine, require_gpus
from support.tiny_models import tiny_directory, tiny_model
from tinsmith_trainer.engines.base import LossKernel
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.expert_products import Assignment, by_all, by_expert
from tinsmith_trainer.torch_model.tiny_model import Family

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""Of sums in another order, as a part of the largest."""
EXPERTS, TOKENS, WIDTH = 8, 40, 64
DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 40, 90))]


@in_place_of_a_gpu
@pytest.mark.parametrize(
    ("family", "recompute_above_tokens", "loss_kernel"),
    [("qwen3", 0, "auto"), ("qwen3-moe", sys.maxsize, "auto"), ("qwen3-moe", 0, "torch")],
    ids=["layers computed again", "experts", "experts computed again"],
)
def test_it_trains_as_on_the_cpu(
    place: Place, family: Family, recompute_above_tokens: int, loss_kernel: LossKernel
) -> None:
    settings = PeftEngineSettings(
        token_budget=64, recompute_above_tokens=recompute_above_tokens, loss_kernel=loss_kernel
    )
    there = peft_engine(place, tiny_directory(family), settings)
    assert_alike(there, build_peft_engine(tiny_model(family)), DATUMS)


def products(device: str, dtype: torch.dtype, rank: int) -> list[torch.Tensor]:
    """What becomes of tokens that go down to a rank and up by experts, and the gradients of all that takes part."""
    generator = torch.Generator().manual_seed(rank)
    shapes = ((TOKENS, WIDTH), (1, rank, WIDTH), (EXPERTS, WIDTH, rank))
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(TOKENS)]).to(device)
    sent = Assignment.of(chosen, EXPERTS)
    out = by_expert(sent.to_experts(by_all(leaves[0], leaves[1])), leaves[2], sent.counts)
    out.square().sum().backward()
    return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)]


@in_place_of_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 4, 6, 8])
def test_one_product_for_all_experts_takes_any_rank_and_has_each_experts_own(
    place: Place, dtype: torch.dtype, rank: int
) -> None:
    """PyTorch refuses rows that are no whole units of 16 bytes. No token comes to the last expert."""
    expected = products("cpu", dtype, rank)
    if place == "gpu":
        require_gpus()
        found = products("cuda", dtype, rank)
    else:
        with grouped_experts():
            found = products("cpu", dtype, rank)
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        rounding = ROUNDING[dtype] * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=rounding)
