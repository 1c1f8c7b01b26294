"""PEFT's file format for a LoRA adapter, without torch: what `peft.PeftModel.from_pretrained` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.disk.durable_files import Pieces
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.engines.expert_layouts import fused, one_by_one, peft_targets
from tinsmith_trainer.engines.tensor_files import tensor_file, tensors_of

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_KEY_PREFIX = "base_model.model."
_STATE_PREFIX = "weights/"

Tensors = Mapping[str, NDArray[np.float32]]


def encode_adapter(lora: LoraSpec, tensors: Tensors, base_model: str) -> dict[str, Pieces]:
    """File name to content, from an adapter state's `weights/<module>.lora_A|B` tensors, which are not copied.

    `base_model` is the name or path that PEFT will look the base model up by.
    """
    weights = _weights(tensors)
    return _encoded(weights, _config(lora, _modules(weights), base_model))


def write_adapter(
    folder: Path, lora: LoraSpec, tensors: Tensors, base_model: str, *, interleaved: Container[str] = ()
) -> None:
    """For PEFT, into an existing folder; not synced. `interleaved`: as `expert_layouts.fused` takes it."""
    weights = _weights(tensors)
    experts = fused(weights, lora.rank, lora.alpha, interleaved)
    linears = {name: tensor for name, tensor in weights.items() if tensor.ndim == 2}
    modules, parameters = peft_targets(_modules(linears), has_experts=bool(experts.parameters))
    config = _config(lora, modules, base_model)
    if experts.parameters:
        config |= {
            "target_parameters": [*parameters, *experts.parameters],
            "rank_pattern": {re.escape(name): rank for name, rank in experts.rank_pattern.items()},
            "alpha_pattern": {re.escape(name): alpha for name, alpha in experts.alpha_pattern.items()},
        }
    _write(folder, _encoded({**linears, **experts.tensors}, config))


def write_each_expert(folder: Path, lora: LoraSpec, tensors: Tensors, base_model: str) -> None:
    """For a server that keeps a mixture's experts apart, into an existing folder; not synced."""
    weights = one_by_one(_weights(tensors))
    _write(folder, _encoded(weights, _config(lora, _modules(weights), base_model)))


def _weights(tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """By `<module>.lora_A|B`."""
    return {
        name.removeprefix(_STATE_PREFIX): value for name, value in tensors.items() if name.startswith(_STATE_PREFIX)
    }


def _modules(weights: Tensors) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in weights})


def _encoded(weights: Tensors, config: dict[str, object]) -> dict[str, Pieces]:
    return {
        CONFIG_FILE: [json.dumps(config, indent=2).encode() + b"\n"],
        WEIGHTS_FILE: tensor_file({_peft_key(name): tensor for name, tensor in weights.items()}, {"format": "pt"}),
    }


def _write(folder: Path, files: Mapping[str, Pieces]) -> None:
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.writelines(content)


def decode_weights(content: bytes | memoryview) -> dict[str, NDArray[np.float32]]:
    """The inverse for the weights file: views of its content, by the adapter state's names."""
    return {_state_name(key): tensor for key, tensor in tensors_of(content).items()}


def _config(lora: LoraSpec, modules: list[str], base_model: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": modules,
        "modules_to_save": None,
    }


def _peft_key(name: str) -> str:
    return f"{_KEY_PREFIX}{name}.weight"


def _state_name(peft_key: str) -> str:
    return f"{_STATE_PREFIX}{peft_key.removeprefix(_KEY_PREFIX).removesuffix('.weight')}"
