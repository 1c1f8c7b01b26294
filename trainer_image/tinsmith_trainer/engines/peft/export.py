"""An adapter's state as files: a PEFT adapter, or a whole model with the adapter merged in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tinsmith_trainer.engines.base import AdapterState, ExportLayout
from tinsmith_trainer.torch_model.loading import TorchModel, resolve_directory
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME

PEFT_PREFIX = "base_model.model."
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def export_adapter(torch_model: TorchModel, state: AdapterState, target: Path, layout: ExportLayout) -> None:
    """Writes into the existing directory `target`."""
    if layout == "peft":
        _export_peft(torch_model, state, target)
    else:
        _export_merged(torch_model, state, target)


def _weights(state: AdapterState) -> dict[str, Tensor]:
    prefix = "weights/"
    return {
        name.removeprefix(prefix): torch.from_numpy(array.copy())
        for name, array in state.tensors.items()
        if name.startswith(prefix)
    }


def _modules(state: AdapterState) -> list[str]:
    suffix = ".lora_A"
    return sorted(name.removesuffix(suffix) for name in _weights(state) if name.endswith(suffix))


def _export_peft(torch_model: TorchModel, state: AdapterState, target: Path) -> None:
    modules = _modules(state)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": torch_model.info.path,
        "r": state.lora.rank,
        "lora_alpha": state.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"{PEFT_PREFIX}{name}.weight": tensor for name, tensor in _weights(state).items()}
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def _export_merged(torch_model: TorchModel, state: AdapterState, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        resolve_directory(torch_model.info.path), dtype=torch_model.model.dtype
    )
    weights = _weights(state)
    if torch_model.tied_embeddings and f"{UNEMBED_NAME}.lora_A" in weights:
        _untie(model)
    scaling = state.lora.alpha / state.lora.rank
    for module in _modules(state):
        weight = model.get_submodule(module).weight
        delta = scaling * (weights[f"{module}.lora_B"] @ weights[f"{module}.lora_A"])
        weight.data.copy_(weight.data.float() + delta)
    model.save_pretrained(target)
    torch_model.tokenizer.save_pretrained(target)


def _untie(model: Any) -> None:
    """Gives the output projection a weight of its own: the adapter moved it and left the embedding alone."""
    model.config.tie_word_embeddings = False
    head = model.get_submodule(UNEMBED_NAME)
    head.weight = nn.Parameter(head.weight.detach().clone())
