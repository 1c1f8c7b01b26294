"""A microbatch is as large as its device's memory allows, and follows from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.peft.token_budget import (
    activation_bytes_per_token,
    fitting_token_budget,
    token_budget_of,
)
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


@pytest.mark.parametrize(
    ("memory_gb", "tokens"),
    [
        pytest.param(24, 1024, id="a small one"),
        pytest.param(85, 4096, id="80 GB"),
        pytest.param(200, 8192, id="192 GB"),
    ],
)
def test_a_gpu_takes_what_its_memory_holds(memory_gb: int, tokens: int) -> None:
    assert fitting_token_budget(memory_gb * GB, QWEN3_8B, WEIGHTS, 2) == tokens


def test_a_small_model_does_not_take_all_that_there_is() -> None:
    config = tiny_model().model.config
    assert fitting_token_budget(80 * GB, config, 10**6, 2) == 16_384


def test_what_the_operator_says_holds_and_a_cpu_takes_1024() -> None:
    assert token_budget_of(tiny_model(), 77) == 77
    assert token_budget_of(tiny_model(), None) == 1024


def test_the_estimate_of_activations_holds_what_a_forward_keeps() -> None:
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


def test_the_plan_of_memory_is_what_the_code_would_do() -> None:
    plan = (ROOT / "docs" / "gpu.md").read_text()
    per_token = activation_bytes_per_token(QWEN3_8B, 2)
    assert f"{4096 * per_token / GB:.1f} | {per_token / 10**6:.1f} MB a token" in plan
    assert f"| {(85 * GB - WEIGHTS) / 4 / GB:.1f} | a quarter" in plan
