"""Export of an adapter to files: as a PEFT adapter, or merged into a whole model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from tinsmith_trainer.engines import peft_layout
from tinsmith_trainer.engines.base import AdapterState, ExportLayout
from tinsmith_trainer.engines.peft_layout import expert_modules
from tinsmith_trainer.torch_model.architecture import auto_class, skeleton
from tinsmith_trainer.torch_model.experts import expert_projections, is_adaptable, merge_into_experts
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME
from tinsmith_trainer.torch_model.quantization import load_to_save

IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
WEIGHTS_PREFIX = "weights/"
A_SUFFIX = ".lora_A"


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The directory of a base model's files, the name by which PEFT finds the model, and the dtype of computation."""

    directory: Path
    name: str
    dtype: torch.dtype


def export_adapter(base: BaseFiles, state: AdapterState, target: Path, layout: ExportLayout) -> None:
    """Write the adapter into the existing directory `target`."""
    if layout == "peft":
        interleaved = _interleaved_experts(base.directory) if expert_modules(state.tensors) else frozenset()
        peft_layout.write_adapter(target, state.lora, state.tensors, base.name, interleaved=interleaved)
    else:
        _export_merged(base, state, target)


def _interleaved_experts(directory: Path) -> frozenset[str]:
    """Return the names of experts that have gate and up interleaved in one weight.

    No weights of the model are loaded.
    """
    model = skeleton(AutoConfig.from_pretrained(directory))
    return frozenset(
        name
        for name, module in model.named_modules()
        if is_adaptable(module) and not getattr(module, "is_concatenated", True)
    )


def _export_merged(base: BaseFiles, state: AdapterState, target: Path) -> None:
    """Merge into a second, dense copy of the base model, because the loaded copy serves other adapters."""
    config = AutoConfig.from_pretrained(base.directory)
    model = load_to_save(auto_class(config), base.directory, config, base.dtype)
    modules = _modules(state)
    if getattr(model.config, "tie_word_embeddings", False) and UNEMBED_NAME in modules:
        _untie(model)
    experts = {name.rpartition(".")[0] for name in expert_projections(model)}
    of_experts: dict[str, dict[str, Tensor]] = {}
    for module in modules:
        parent, _, part = module.rpartition(".")
        if parent in experts:
            of_experts.setdefault(parent, {})[part] = _delta(state, module)
        else:
            weight = model.get_submodule(module).weight.data
            weight.copy_(weight.float() + _delta(state, module))
    for name, deltas in of_experts.items():
        merge_into_experts(model.get_submodule(name), deltas)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(base.directory).save_pretrained(target)
    if (processor := base.directory / IMAGE_PROCESSOR_FILE).is_file():
        shutil.copyfile(processor, target / IMAGE_PROCESSOR_FILE)


def _delta(state: AdapterState, module: str) -> Tensor:
    """Return the delta that an adapter adds to a weight: `[d_out, d_in]`, or `[experts, d_out, d_in]`."""
    lora_A, lora_B = (torch.from_numpy(state.tensors[f"{WEIGHTS_PREFIX}{module}.lora_{part}"]) for part in "AB")
    return (state.lora.alpha / state.lora.rank) * (lora_B @ lora_A)


def _modules(state: AdapterState) -> list[str]:
    return sorted(
        name.removeprefix(WEIGHTS_PREFIX).removesuffix(A_SUFFIX)
        for name in state.tensors
        if name.startswith(WEIGHTS_PREFIX) and name.endswith(A_SUFFIX)
    )


def _untie(model: Any) -> None:
    """Give the output projection a separate weight.

    The adapter changes the weight of the output projection, but must not change the embedding.
    """
    model.config.tie_word_embeddings = False
    head = model.get_submodule(UNEMBED_NAME)
    head.weight = nn.Parameter(head.weight.detach().clone())
