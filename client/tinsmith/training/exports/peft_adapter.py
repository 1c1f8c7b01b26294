"""An adapter in PEFT's layout.

The gate and up projections of experts become one parameter with an adapter of twice the rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinsmith.training.exports.base_model import BaseModel
from tinsmith.training.exports.stored import DOWN, GATE, UP, StoredAdapter, experts_of, is_by_turns, peft_key
from tinsmith.training.server_files import CONFIG_FILE, WEIGHTS_FILE

FORMER_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of layers that PEFT treats as projections of experts in the layout of transformers 4, anywhere in a model."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter for `peft.PeftModel.from_pretrained`: tensors by PEFT's names, and the `adapter_config`."""

    tensors: Mapping[str, Tensor]
    adapter_config: Mapping[str, Any]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapter to a folder. A missing folder is created."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(dict(self.adapter_config), indent=2) + "\n")
        save_file(dict(self.tensors), folder / WEIGHTS_FILE, {"format": "pt"})


def for_peft(adapter: StoredAdapter, base: BaseModel | None, name: str) -> AdapterWeights:
    """Return the adapter in PEFT's layout. PEFT loads the base model by `name`. `base` is needed for experts."""
    config = {**adapter.config, "base_model_name_or_path": name}
    tensors = {peft_key(key): factor for key, factor in adapter.factors.items() if factor.ndim == 2}
    linears = [module for module in adapter.modules if adapter.pair(module)[0].ndim == 2]
    if not adapter.experts:
        return AdapterWeights(tensors, {**config, "target_modules": linears})
    assert base is not None, "a mixture's layout is its model's"
    in_model = experts_of(base.without_weights())
    by_turns = {layer for layer, module in in_model.items() if is_by_turns(module)}
    tensors |= {peft_key(key): factor for key, factor in _fused(adapter, by_turns)}
    return AdapterWeights(tensors, config | _targets(adapter, linears))


def _targets(adapter: StoredAdapter, linears: list[str]) -> dict[str, Any]:
    """Return the settings for the targets.

    In a model with experts, PEFT would rename layers with certain names, so such layers are listed as parameters.
    """
    moved = [name for name in linears if name.rpartition(".")[2] in FORMER_NAMES]
    gated = [f"{layer}.gate_up_proj" for layer in adapter.experts if f"{layer}.{UP}" in adapter.modules]
    parameters = [f"{name}.weight" for name in moved]
    for layer in adapter.experts:
        up = f"{layer}.gate_up_proj"
        parameters += [up if up in gated else f"{layer}.up_proj", f"{layer}.down_proj"]
    return {
        "target_modules": [name for name in linears if name not in moved],
        "target_parameters": parameters,
        "rank_pattern": {re.escape(name): 2 * adapter.rank for name in gated},
        "alpha_pattern": {re.escape(name): 2 * adapter.alpha for name in gated},
    }


def _fused(adapter: StoredAdapter, by_turns: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of experts.

    The factors of gate and up are joined to twice the rank, and factors that experts share are repeated.

    PEFT wraps one parameter inside another, and the last parameter is outermost.
    """
    for layer in adapter.experts:
        first = _whole(*adapter.pair(f"{layer}.{GATE}"))
        if f"{layer}.{UP}" in adapter.modules:
            first = _gate_and_up(first, _whole(*adapter.pair(f"{layer}.{UP}")), by_turns=layer in by_turns)
        for name, (lora_A, lora_B) in (
            (f"{layer}.base_layer", first),
            (layer, _whole(*adapter.pair(f"{layer}.{DOWN}"))),
        ):
            yield f"{name}.lora_A", lora_A.reshape(-1, lora_A.shape[2]).contiguous()
            yield f"{name}.lora_B", lora_B.permute(1, 2, 0).reshape(lora_B.shape[1], -1).contiguous()


def _whole(lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
    """Expand A to `[experts, rank, d_in]`, and B to `[experts, d_out, rank]`."""
    experts = max(len(lora_A), len(lora_B))
    return lora_A.expand(experts, -1, -1), lora_B.expand(experts, -1, -1)


def _gate_and_up(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], *, by_turns: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of one adapter with twice the rank.

    The two halves of the rank change different rows of the weight.
    """
    (gate_A, gate_B), (up_A, up_B) = gate, up
    experts, width, rank = gate_B.shape
    both = gate_B.new_zeros(experts, 2 * width, 2 * rank)
    of_gate, of_up = (slice(0, None, 2), slice(1, None, 2)) if by_turns else (slice(width), slice(width, None))
    both[:, of_gate, :rank] = gate_B
    both[:, of_up, rank:] = up_B
    return torch.cat([gate_A, up_A], 1), both
