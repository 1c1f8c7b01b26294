"""PEFT's file format for a LoRA adapter, without torch: what `peft.PeftModel.from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors

from tinsmith_trainer.durable_files import Pieces
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.engines.tensor_files import tensor_file

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_KEY_PREFIX = "base_model.model."
_STATE_PREFIX = "weights/"

Tensors = Mapping[str, NDArray[np.float32]]


def encode_adapter(lora: LoraSpec, tensors: Tensors, base_model: str) -> dict[str, Pieces]:
    """File name to content, from an adapter state's `weights/<module>.lora_A|B` tensors, which are not copied.

    `base_model` is the name or path that PEFT will look the base model up by.
    """
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(_STATE_PREFIX)}
    modules = sorted({_module(name) for name in weights})
    return {
        CONFIG_FILE: [json.dumps(_config(lora, modules, base_model), indent=2).encode() + b"\n"],
        WEIGHTS_FILE: tensor_file({_peft_key(name): tensor for name, tensor in weights.items()}, {"format": "pt"}),
    }


def write_adapter(folder: Path, lora: LoraSpec, tensors: Tensors, base_model: str) -> None:
    """The files of `encode_adapter`, into an existing folder; not synced."""
    for name, content in encode_adapter(lora, tensors, base_model).items():
        with (folder / name).open("wb") as file:
            file.writelines(content)


def decode_weights(content: bytes) -> dict[str, NDArray[np.float32]]:
    """The inverse for the weights file: tensors by the adapter state's names."""
    return {_state_name(key): tensor for key, tensor in load_tensors(content).items()}


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


def _module(state_name: str) -> str:
    return state_name.removeprefix(_STATE_PREFIX).rsplit(".", 1)[0]


def _peft_key(state_name: str) -> str:
    return f"{_KEY_PREFIX}{state_name.removeprefix(_STATE_PREFIX)}.weight"


def _state_name(peft_key: str) -> str:
    return f"{_STATE_PREFIX}{peft_key.removeprefix(_KEY_PREFIX).removesuffix('.weight')}"
