"""The files of a base model on this machine, and the transformers model from these files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from tinsmith.training.errors import BaseModelUnusable

UNUSED_FILES = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "original/*"]
"""Copies of the weights for other frameworks. Copies for other frameworks could double the size of a download."""
MADE_DENSE = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
ADAPTER_CONFIG = "adapter_config.json"
MOST_NAMED = 5
GIVE = "Set base_model to a folder with config.json and weights, or to a repository of the hub"


class BaseModel:
    """A base model in a folder, or in a hub repository that is cached or reachable.

    Raises BaseModelUnusable if the model is missing or cannot be read.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.directory = _directory(source)
        if (self.directory / ADAPTER_CONFIG).is_file():
            raise BaseModelUnusable(
                f"the base model {source} contains a PEFT adapter ({ADAPTER_CONFIG}), which transformers "
                "would add to it. Move the adapter's files to another folder"
            )
        try:
            self._config = AutoConfig.from_pretrained(self.directory)
        except (OSError, ValueError) as error:
            raise _unusable(source, error) from error

    def without_weights(self) -> Any:
        """Return the model's modules without memory for the weights."""
        with torch.device("meta"):
            return self._class().from_config(self._config)

    def load(self) -> Any:
        """Load the model on the CPU, in the model's dtype and with dense weights. Raises BaseModelUnusable."""
        options = self._dequantizing()
        try:
            model, report = self._class().from_pretrained(
                self.directory,
                config=self._config,
                dtype="auto",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise _unusable(self.source, error) from error
        _check_complete(self.source, report)
        return self._dense(model) if options else model

    def _class(self) -> Any:
        """Return the class of the whole model, including a vision tower.

        If `architectures` names a class with a vision tower, return this class.
        """
        is_text = type(self._config) in AutoModelForCausalLM._model_mapping
        sees = type(self._config) in AutoModelForImageTextToText._model_mapping
        return AutoModelForImageTextToText if sees and not is_text else AutoModelForCausalLM

    def _dequantizing(self) -> dict[str, Any]:
        quantization = getattr(self._config, "quantization_config", None) or {}
        quantization = dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
        method = quantization.pop("quant_method", "")
        if not method:
            return {}
        if method not in MADE_DENSE:
            raise BaseModelUnusable(
                f"the weights of {self.source} are quantized with {method!r}; only {' and '.join(MADE_DENSE)} are "
                "supported; use the model's original weights"
            )
        return {"quantization_config": MADE_DENSE[method](**{**quantization, "dequantize": True})}

    def _dense(self, model: Any) -> Any:
        """Remove the quantization config from the model, and return the model.

        If the quantization config remained, transformers would write it together with the model.
        """
        del self._config.quantization_config
        with torch.device("meta"):
            dense = self._class().from_config(self._config, dtype=model.dtype)
        dense.load_state_dict(model.state_dict(), assign=True)
        _copy_unsaved_attributes(dense, model)
        return dense


def _check_complete(source: str, report: Mapping[str, Any]) -> None:
    """Raise BaseModelUnusable if tensors are missing.

    For missing tensors, transformers uses random values and only warns.
    """
    lost = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if lost:
        raise BaseModelUnusable(
            f"the base model {source} lacks tensors of its architecture, or has other shapes "
            f"({len(lost)}: {', '.join(lost[:MOST_NAMED])}). Copy the model's files again"
        )


def _copy_unsaved_attributes(dense: Any, model: Any) -> None:
    """Copy values that a state dict does not contain: some buffers, the generation config, and the training mode."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in persistent:
            parent, _, leaf = name.rpartition(".")
            dense.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)
    dense.generation_config = model.generation_config
    dense.train(model.training)


def _directory(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith("."):
        raise BaseModelUnusable(f"the folder {source} does not exist. {GIVE}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, ignore_patterns=UNUSED_FILES))
    except Exception as error:  # the hub's client raises many kinds of errors
        raise _unusable(source, error) from error


def _unusable(source: str, error: Exception) -> BaseModelUnusable:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return BaseModelUnusable(f"the base model {source} cannot be loaded: {reason}. {GIVE}")
