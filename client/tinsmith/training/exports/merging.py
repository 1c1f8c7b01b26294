"""A base model with an adapter merged into the weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoTokenizer

from tinsmith.training.errors import BaseModelUnusable
from tinsmith.training.exports.base_model import BaseModel
from tinsmith.training.exports.stored import UNEMBED, StoredAdapter, add_to_experts, experts_of, shapes_of

IMAGE_PROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """A transformers model on the CPU, in the dtype of the base model. The adapter is added to the model's weights."""

    base: BaseModel
    model: Any

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the `state_dict` of the model. The tensors share the model's memory."""
        state: Mapping[str, Tensor] = self.model.state_dict()
        return state

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model, the tokenizer and the image processor to a folder. A missing folder is created."""
        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.base.directory).save_pretrained(folder)
        if (processor := self.base.directory / IMAGE_PROCESSOR_FILE).is_file():
            shutil.copyfile(processor, Path(folder) / IMAGE_PROCESSOR_FILE)


def merged_into(adapter: StoredAdapter, base: BaseModel) -> MergedWeights:
    """Add the adapter to the weights in float32. The dtype of the weights stays the same.

    PEFT's `merge_and_unload` is not used: it would change a tied embedding together with the output projection, and
    refuses state-space models. Raises BaseModelUnusable if the adapter is not for this model.
    """
    model = base.load()
    experts = experts_of(model)
    _check_fit(adapter, model, experts, base.source)
    if getattr(model.config, "tie_word_embeddings", False) and UNEMBED in adapter.modules:
        _untie(model)
    for layer in adapter.experts:
        add_to_experts(experts[layer], {part: adapter.delta(f"{layer}.{part}") for part in shapes_of(experts[layer])})
    for module in adapter.modules:
        if module.rpartition(".")[0] not in adapter.experts:
            weight = model.get_submodule(module).weight.data
            weight.copy_(weight.float() + adapter.delta(module))
    return MergedWeights(base, model)


def _check_fit(adapter: StoredAdapter, model: nn.Module, experts: Mapping[str, Any], source: str) -> None:
    expected = {
        f"{layer}.{part}": shape
        for layer in adapter.experts
        if layer in experts
        for part, shape in shapes_of(experts[layer]).items()
    }
    linears = {
        name: tuple(module.weight.shape) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    missing = [module for module in expected if module not in adapter.modules]
    for module in [*adapter.modules, *missing]:
        has = expected.get(module) or linears.get(module)
        wants = None if module in missing else _weight_shape(adapter, module)
        if has != wants:
            raise BaseModelUnusable(
                f"the adapter does not fit {source}: {module} has shape {_shape_text(has)} there and "
                f"{_shape_text(wants)} in the adapter, which was trained on {adapter.base_model}"
            )


def _weight_shape(adapter: StoredAdapter, module: str) -> tuple[int, ...]:
    """Return the shape of the weight that the adapter's factors change."""
    lora_A, lora_B = adapter.pair(module)
    experts = (max(len(lora_A), len(lora_B)),) if lora_A.ndim == 3 else ()
    return (*experts, lora_B.shape[-2], lora_A.shape[-1])


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " by ".join(map(str, shape))


def _untie(model: Any) -> None:
    """Give the output projection a weight of its own, because the adapter does not change the embedding."""
    model.config.tie_word_embeddings = False
    head = model.get_submodule(UNEMBED)
    head.weight = nn.Parameter(head.weight.detach().clone())
