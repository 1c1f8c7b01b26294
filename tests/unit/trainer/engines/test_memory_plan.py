"""A microbatch is as large as its device's memory allows, and what does not fit is computed again in backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import Recompute
from tinsmith_trainer.engines.peft.settings import (
    MemoryPlan,
    activation_bytes_per_token,
    activations_room,
    plan_for_room,
    plan_memory,
    recomputed_bytes_per_token,
)
from tinsmith_trainer.sampling.builtin.steps.memory import StepSizes
from torch import Tensor
from transformers import Qwen3Config

ROOT = Path(__file__).parents[4]
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
GB = 10**9
WEIGHTS = int(16.4 * GB)


def planned(memory_gb: int, configured_budget: int | None = None, recompute: Recompute = "auto") -> MemoryPlan:
    """Return the plan for Qwen3-8B in bfloat16."""
    return plan_for_room(activations_room(memory_gb * GB, WEIGHTS), QWEN3_8B, 2, configured_budget, recompute)


@pytest.mark.parametrize(
    ("memory_gb", "tokens"),
    [
        pytest.param(24, 1024, id="a small one"),
        pytest.param(85, 4096, id="80 GB"),
        pytest.param(200, 8192, id="192 GB"),
    ],
)
def test_the_default_of_a_gpu_fits_its_memory(memory_gb: int, tokens: int) -> None:
    assert planned(memory_gb).token_budget == tokens


@pytest.mark.parametrize(
    ("memory_gb", "kept_tokens"),
    [
        pytest.param(24, 458, id="a small one, below its smallest microbatch"),
        pytest.param(85, 4135, id="80 GB, no microbatch of short datums"),
    ],
)
def test_layers_without_space_on_a_gpu_are_recomputed(memory_gb: int, kept_tokens: int) -> None:
    assert planned(memory_gb).recompute_above_tokens == kept_tokens
    assert planned(memory_gb, configured_budget=16_384) == MemoryPlan(16_384, kept_tokens, 16_384)


def test_the_configured_token_budget_applies_and_the_default_of_a_cpu_is_1024() -> None:
    assert plan_memory(tiny_model(), 77, "auto") == MemoryPlan(77, 2048, 1024)
    assert plan_memory(tiny_model(), 5000, "auto") == MemoryPlan(5000, 5000, 1024)
    assert plan_memory(tiny_model(), None, "layers") == MemoryPlan(1024, 0, 1024)


def test_calls_of_several_adapters_fill_the_memory_that_a_power_of_two_leaves() -> None:
    assert planned(85).token_budget == 4096
    assert planned(85).cobatch_tokens == planned(85).recompute_above_tokens == 4135
    assert planned(85, recompute="layers").cobatch_tokens == planned(85, recompute="layers").token_budget


def test_the_estimate_of_activations_covers_the_tensors_that_a_forward_keeps() -> None:
    """Counted by autograd, with LoRA on every layer; it may be too high by half, and never too low."""
    model, tokens = tiny_model(), 256
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] != (tokens, tokens):  # some CPUs' attention keeps all pairs; no GPU's does
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    decoder = model.model.get_decoder()
    trained = decoder.embed_tokens.register_forward_hook(lambda *hooked: hooked[2].requires_grad_())
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    finally:
        trained.remove()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.model.parameters()}
    measured = sum(size for place, size in kept.items() if place not in weights) / tokens
    assert measured <= activation_bytes_per_token(model.model.config, 4) <= 2 * measured


def test_the_memory_plan_agrees_with_the_code() -> None:
    plan = (ROOT / "docs" / "how-to" / "gpu.md").read_text()
    per_token = activation_bytes_per_token(QWEN3_8B, 2)
    assert f"{4096 * per_token / GB:.1f} | {per_token / 10**6:.1f} MB a token" in plan
    kept = planned(85).recompute_above_tokens
    assert f"more than {round(kept, -2):,} tokens" in plan
    again = recomputed_bytes_per_token(QWEN3_8B, 2)
    assert (
        f"{again / 10**6:.1f} MB are held, and 27.2 GB hold {round(activations_room(85 * GB, WEIGHTS) // again, -3):,}"
        in plan
    )
    parameters = 92.3e6  # of rank 32 on all layers
    # Weights, gradients, two moments and the gradient of a call in float32; two copies of a forward in bfloat16.
    in_a_call = 5 * 4 + 2 * 2
    assert f"| adapters, {parameters * in_a_call / GB:.1f} GB each | {10 * parameters * in_a_call / GB:.1f} |" in plan
    assert f"{in_a_call} bytes per parameter during a call" in plan
    token = 2 * 36 * 8 * 128 * 2
    share = (85 * GB - WEIGHTS) // 4
    steps = StepSizes(36, 4, 151_936, 2, rows=32, records=True).memory(share, 40_960 * token)
    kept = share - steps.nbytes
    assert f"| keys and values of samples | {kept / GB:.1f} | {round(kept // token, -3):,} tokens" in plan
    assert f"| stacks of adapters for samples | {steps.stacked_adapter_bytes / GB:.1f} | 1 GiB" in plan
    assert f"| {steps.recorded_steps} recorded steps of samples | {steps.recorded_bytes / GB:.1f} | a quarter" in plan
