"""PEFT's file format for LoRA adapters, without torch: what `peft.PeftModel.from_pretrained` reads.

The adapters of a mixture's experts are converted to the layouts of other programs: to PEFT's fused layout, or to one
adapter for each expert. Tinsmith's own layout is the layout of Tinker: `<experts>.w1`, `.w3` and `.w2` have three
dimensions, and all experts share the factor at the model's hidden size (torch_model/experts.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.disk.durable_files import Pieces
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.engines.tensor_files import tensor_file, tensors_of

GATE, UP, DOWN = "w1", "w3", "w2"
FORMER_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that PEFT takes for projections of experts in the layout of transformers 4, anywhere in the model."""
GATED_NAMES = {GATE: "gate_proj", UP: "up_proj", DOWN: "down_proj"}
UNGATED_NAMES = {GATE: "up_proj", DOWN: "down_proj"}

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """PEFT's fused adapters of experts: the tensors by module, and the configuration of the adapted parameters.

    Gate and up are one parameter with twice the rank, and a factor that experts share is repeated for each expert.
    """

    tensors: dict[str, Array]
    parameters: list[str]
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]


def expert_modules(tensors: Tensors) -> list[str]:
    """Return the module names of experts in an adapter's tensors, which are named `<module>.lora_A|B`."""
    return sorted({name.rsplit(".", 2)[0] for name, tensor in tensors.items() if tensor.ndim == 3})


def peft_targets(modules: Iterable[str], *, has_experts: bool) -> tuple[list[str], list[str]]:
    """Return `target_modules` and `target_parameters` of linear layers.

    In a model with experts, PEFT handles target modules with the former names of experts as experts
    (peft.utils.transformers_weight_conversion, 0.21). So linear layers with these names are target parameters.
    """
    named = list(modules)
    moved = {name for name in named if has_experts and name.rpartition(".")[2] in FORMER_NAMES}
    return [name for name in named if name not in moved], [f"{name}.weight" for name in named if name in moved]


def fuse_experts(tensors: Tensors, rank: int, alpha: float, interleaved: Container[str]) -> FusedExperts:
    """Convert adapters of experts to PEFT's fused layout.

    `interleaved` are the names of experts with alternating rows of gate and up in one weight.
    """
    layout = FusedExperts({}, [], {}, {})
    for name in expert_modules(tensors):
        present = [part for part in (GATE, UP, DOWN) if _has(tensors, f"{name}.{part}")]
        parts = {part: _whole(tensors, f"{name}.{part}") for part in present}
        is_gated = UP in parts
        up = _gate_and_up(parts[GATE], parts[UP], is_interleaved=name in interleaved) if is_gated else parts[GATE]
        # PEFT wraps one parameter around the other: the last is the outermost.
        layout.tensors.update({f"{name}.base_layer.{key}": flat for key, flat in _flat(*up)})
        layout.tensors.update({f"{name}.{key}": flat for key, flat in _flat(*parts[DOWN])})
        up_name = f"{name}.{'gate_up_proj' if is_gated else 'up_proj'}"
        layout.parameters.extend((up_name, f"{name}.down_proj"))
        if is_gated:
            layout.rank_pattern[up_name], layout.alpha_pattern[up_name] = 2 * rank, 2 * alpha
    return layout


def split_experts(tensors: Tensors) -> dict[str, Array]:
    """Split adapters of experts into `<experts>.<number>.gate_proj.lora_A` and so on, of two dimensions.

    Other tensors are returned unchanged.
    """
    experts = expert_modules(tensors)
    found = {name: tensor for name, tensor in tensors.items() if tensor.ndim != 3}
    for name in experts:
        names = GATED_NAMES if _has(tensors, f"{name}.{UP}") else UNGATED_NAMES
        for part, own_name in names.items():
            for number, (lora_A, lora_B) in enumerate(zip(*_whole(tensors, f"{name}.{part}"), strict=True)):
                found[f"{name}.{number}.{own_name}.lora_A"] = lora_A
                found[f"{name}.{number}.{own_name}.lora_B"] = lora_B
    return found


def _has(tensors: Tensors, module: str) -> bool:
    return f"{module}.lora_A" in tensors


def _whole(tensors: Tensors, module: str) -> tuple[Array, Array]:
    """Return A `[experts, rank, d_in]` and B `[experts, d_out, rank]`, with the shared factor repeated."""
    lora_A, lora_B = tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]
    experts = max(len(lora_A), len(lora_B))
    return _for_each(lora_A, experts), _for_each(lora_B, experts)


def _for_each(matrix: Array, experts: int) -> Array:
    return np.broadcast_to(matrix, (experts, *matrix.shape[1:]))


def _gate_and_up(gate: tuple[Array, Array], up: tuple[Array, Array], *, is_interleaved: bool) -> tuple[Array, Array]:
    """Return one adapter with twice the rank; one half of the rank is for gate, and the other half for up."""
    (gate_A, gate_B), (up_A, up_B) = gate, up
    experts, width, rank = gate_B.shape
    both = np.zeros((experts, 2 * width, 2 * rank), np.float32)
    of_gate, of_up = (slice(0, None, 2), slice(1, None, 2)) if is_interleaved else (slice(width), slice(width, None))
    both[:, of_gate, :rank] = gate_B
    both[:, of_up, rank:] = up_B
    return np.concatenate([gate_A, up_A], 1), both


def _flat(lora_A: Array, lora_B: Array) -> Iterator[tuple[str, Array]]:
    """Yield PEFT's A `[experts * rank, d_in]` and B `[d_out, rank * experts]` (peft.tuners.lora.layer.ParamWrapper)."""
    yield "lora_A", np.ascontiguousarray(lora_A.reshape(-1, lora_A.shape[2]))
    yield "lora_B", np.ascontiguousarray(lora_B.transpose(1, 2, 0).reshape(lora_B.shape[1], -1))


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_KEY_PREFIX = "base_model.model."
_STATE_PREFIX = "weights/"


def encode_adapter(lora: LoraSpec, tensors: Tensors, base_model: str) -> dict[str, Pieces]:
    """Return file contents by name, from a state's `weights/<module>.lora_A|B` tensors, which are not copied.

    `base_model` is the name or path by which PEFT finds the base model.
    """
    weights = _weights(tensors)
    return _encoded(weights, _config(lora, _modules(weights), base_model))


def write_adapter(
    folder: Path, lora: LoraSpec, tensors: Tensors, base_model: str, *, interleaved: Container[str] = ()
) -> None:
    """Write an adapter for PEFT into an existing folder, without fsync. `interleaved`: see `fuse_experts`."""
    weights = _weights(tensors)
    experts = fuse_experts(weights, lora.rank, lora.alpha, interleaved)
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
    """Write an adapter with separate experts into an existing folder, without fsync."""
    weights = split_experts(_weights(tensors))
    _write(folder, _encoded(weights, _config(lora, _modules(weights), base_model)))


def _weights(tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """Return the weights by `<module>.lora_A|B`."""
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
    """Return views of the content of a weights file, with the names of an adapter state."""
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
