"""The PEFT engine on a GPU, and on its path on a CPU, trains experts and recomputed layers as it does on the CPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from support.engine.contract import forward, forward_backward, spec
from support.engine.datums import sft_datum
from support.engine.like_gpu import grouped_experts
from support.engine.peft import assert_alike
from support.engine.places import Place, in_place_of_a_gpu, peft_engine, require_gpus
from support.sampler.jobs import ask, job
from support.tiny_models import tiny_directory, tiny_model
from tinsmith_trainer.engines.base import AdamParams, Datum, LossKernel
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.options import parse_options
from tinsmith_trainer.torch_model.expert_products import Assignment, by_all, by_expert
from tinsmith_trainer.torch_model.tiny_model import Family
from tinsmith_trainer.worker.engine_factories import build_colocated

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""The difference that another order of sums may make, as a part of the largest element."""
EXPERTS, TOKENS, WIDTH = 8, 40, 64
DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 40, 90))]


@in_place_of_a_gpu
@pytest.mark.parametrize(
    ("family", "recompute_above_tokens", "loss_kernel"),
    [("qwen3", 0, "auto"), ("qwen3-moe", sys.maxsize, "auto"), ("qwen3-moe", 0, "torch")],
    ids=["layers recomputed", "experts", "experts recomputed"],
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
    """Multiply tokens down to a rank and up by experts; return the result and the gradient of each factor."""
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
    """PyTorch refuses rows whose bytes are no multiple of 16. No token comes to the last expert."""
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


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        pytest.param(["--device", "cpu"], 1e-4, id="cpu"),
        pytest.param(["--dtype", "float32"], 1e-4, marks=pytest.mark.gpu, id="gpu-float32"),
        pytest.param(["--dtype", "float32", "--lora-products", "tf32"], 2e-2, marks=pytest.mark.gpu, id="gpu-tf32"),
        pytest.param([], 2e-2, marks=pytest.mark.gpu, id="gpu-bfloat16"),
        pytest.param(["--lora-products", "bfloat16"], 2e-2, marks=pytest.mark.gpu, id="gpu-bfloat16-products"),
    ],
)
def test_a_worker_samples_from_its_trained_adapters_on_one_device(flags: list[str], tolerance: float) -> None:
    """The worker plans the memory of both. The sampler scores a prompt as the engine does."""
    if "cpu" not in flags:
        require_gpus()
    needed = ["--model", str(tiny_directory()), "--volume", "v", "--socket", "s", "--checkpoint-root", "file:///c"]
    engine, sampler = build_colocated(parse_options([*needed, *flags]))
    assert sampler is not None
    engine.create_adapter("a", spec(engine))
    for _ in range(3):
        forward_backward(engine, DATUMS)
        engine.optim_step("a", AdamParams(learning_rate=1e-3))
    text = DATUMS[-1].tokens
    trained = forward(engine, [Datum(text[:-1], {"target_tokens": text[1:].astype(np.int64)})])
    try:
        sampler.load_adapter("a", engine.weights("a"))
        outcome = ask(sampler, job(text, adapter="a", prompt_logprobs=True))
    finally:
        sampler.close()
    np.testing.assert_allclose(outcome.prompt_logprobs[1:], trained.outputs[0]["logprobs"], atol=tolerance)
    assert len(outcome.sequences[0].tokens) == 8
