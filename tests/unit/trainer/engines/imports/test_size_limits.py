"""The files of an adapter may be as large, and its configuration as long, as the base model's largest adapter needs."""

from __future__ import annotations

import json

from tinsmith_trainer.engines.base import AnnouncedAdapter, LoraSpec
from tinsmith_trainer.engines.imports.size_limits import CONFIG_BYTES, Shapes, SizeLimits

LAYERS, EXPERTS, RANK = 94, 128, 8
PARTS = ("gate_proj", "up_proj", "down_proj")


def mixture(lora: LoraSpec) -> Shapes:
    """Return the factors of a mixture of Qwen3-235B's size, with experts on the first axis."""
    if not lora.train_mlp:
        return {}
    return {
        f"model.layers.{layer}.mlp.experts.{part}.{factor}": (EXPERTS, lora.rank, 64)
        for layer in range(LAYERS)
        for part in PARTS
        for factor in ("lora_A", "lora_B")
    }


def test_a_configuration_may_name_every_expert_of_a_large_mixture_and_a_rank_for_each() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part in PARTS
    ]
    config = json.dumps({"target_modules": names, "rank_pattern": dict.fromkeys(names, RANK)})
    limits = SizeLimits.of(AnnouncedAdapter(RANK, 0, True, True, True), mixture)
    assert CONFIG_BYTES < len(config) < limits.config_bytes
