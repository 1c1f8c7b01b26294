"""An adapter in the form that a server exports: PEFT's two files, but with experts in Tinker's own layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tinsmith.training.errors import DownloadDamaged, ExportError
from tinsmith.training.server_files import CONFIG_FILE, WEIGHTS_FILE

KEY_PREFIX, KEY_SUFFIX = "base_model.model.", ".weight"
TINKER_UNEMBED, UNEMBED = "model.unembed_tokens", "lm_head"
OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save")


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter in the server's format.

    `base_model` is the server's name of the base model, and `config` is PEFT's configuration. `factors` maps
    `<module>.lora_A` and `.lora_B` to tensors: A is `[rank, d_in]`, B is `[d_out, rank]`. Factors of experts have an
    additional first dimension for the experts. The first dimension is 1 if all experts of a layer share the factor: A
    of `w1` (gate) and `w3` (up), and B of `w2` (down).
    """

    base_model: str
    config: Mapping[str, Any]
    factors: Mapping[str, Tensor]

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        return float(self.config["lora_alpha"])

    @property
    def modules(self) -> list[str]:
        return sorted({name.rpartition(".")[0] for name in self.factors})

    @property
    def experts(self) -> list[str]:
        """Return the names of the experts modules of the layers."""
        return sorted({name.rsplit(".", 2)[0] for name, factor in self.factors.items() if factor.ndim == 3})

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """Return the factors A and B. Raises KeyError."""
        return self.factors[f"{module}.lora_A"], self.factors[f"{module}.lora_B"]

    def delta(self, module: str) -> Tensor:
        """Return the change of a weight, in float32: `[d_out, d_in]`, or `[experts, d_out, d_in]`."""
        lora_A, lora_B = (factor.float() for factor in self.pair(module))
        return (self.alpha / self.rank) * torch.matmul(lora_B, lora_A)


def read_adapter(folder: Path, base_model: str) -> StoredAdapter:
    """Read the adapter's files.

    Raises DownloadDamaged, and ExportError if the adapter is not an ordinary LoRA adapter.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        tensors = load_file(folder / WEIGHTS_FILE)
    except (ValueError, SafetensorError) as error:
        raise DownloadDamaged(f"the adapter from the server cannot be read: {error}") from error
    odd = [kind for kind in OTHER_KINDS if config.get(kind)]
    factors = {_name(key): tensor for key, tensor in tensors.items()}
    unpaired = [name for name in factors if _other(name) not in factors]
    if odd or unpaired:
        raise ExportError(
            f"the adapter is not a plain LoRA adapter: {(odd or unpaired)[0]}. Download it with "
            "tinker_cookbook.weights.download, and use it with the program that made it"
        )
    return StoredAdapter(base_model, config, factors)


def peft_key(name: str) -> str:
    return f"{KEY_PREFIX}{name}{KEY_SUFFIX}"


def _name(key: str) -> str:
    module, _, factor = key.removeprefix(KEY_PREFIX).removesuffix(KEY_SUFFIX).rpartition(".")
    return f"{UNEMBED if module == TINKER_UNEMBED else module}.{factor}"


def _other(name: str) -> str:
    """Return the name of the other factor: B for A, and A for B.

    For any other name, return a name that is not in the adapter.
    """
    module, _, factor = name.rpartition(".")
    return f"{module}.{ {'lora_A': 'lora_B', 'lora_B': 'lora_A'}.get(factor, '') }"


GATE, UP, DOWN = "w1", "w3", "w2"


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return the experts modules by name. Only modules in the form for transformers' experts functions are included."""
    return {name: module for name, module in model.named_modules() if _is_experts(module)}


def is_by_turns(module: Any) -> bool:
    return not getattr(module, "is_concatenated", True)


def shapes_of(module: Any) -> dict[str, tuple[int, int, int]]:
    """Return (experts, d_out, d_in) for each projection, by Tinker's names."""
    experts, hidden, inner = _by_output(module, module.down_proj).shape
    ups = (GATE, UP) if module.has_gate else (GATE,)
    return {**dict.fromkeys(ups, (experts, inner, hidden)), DOWN: (experts, hidden, inner)}


def add_to_experts(module: Any, deltas: Mapping[str, Tensor]) -> None:
    """Add the deltas in place. `deltas` contains one tensor `[experts, d_out, d_in]` for each projection."""
    if module.has_gate:
        _add(module, "gate_up_proj", _joined(deltas[GATE], deltas[UP], by_turns=is_by_turns(module)))
    else:
        _add(module, "up_proj", deltas[GATE])
    _add(module, "down_proj", deltas[DOWN])


def _is_experts(module: nn.Module) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    has_up = "gate_up_proj" in weights or "up_proj" in weights
    return hasattr(module, "is_transposed") and has_up and "down_proj" in weights


def _by_output(module: Any, weight: Tensor) -> Tensor:
    return weight.mT if module.is_transposed else weight


def _add(module: Any, name: str, delta: Tensor) -> None:
    weight = getattr(module, name).data
    weight.copy_(weight.float() + _by_output(module, delta))


def _joined(gate: Tensor, up: Tensor, *, by_turns: bool) -> Tensor:
    """Join gate and up along d_out."""
    return torch.stack([gate, up], 2).flatten(1, 2) if by_turns else torch.cat([gate, up], 1)
