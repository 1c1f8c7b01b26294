"""Checkpoints whose files hold quantized weights: the supported formats, and how they are read.

gpt-oss comes in MXFP4, DeepSeek V3 in FP8 with scales by blocks. Both are unpacked when they are read, to the dtype of
the computation. So engine and sampler use ordinary weights. Other formats are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import FineGrainedFP8Config, Mxfp4Config

from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.architecture import skeleton

DENSE = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}


def stored_format(config: Any) -> str:
    """Return transformers' name for the format, or an empty string for dense weights."""
    return str(_options(config).get("quant_method", ""))


def dequantizing(directory: Path, config: Any) -> dict[str, Any]:
    """Return additional arguments for loading with transformers. There are none if the checkpoint is not quantized.

    Raises ModelDirectoryInvalid for an unsupported format.
    """
    options, method = _options(config), stored_format(config)
    if not method:
        return {}
    if method not in DENSE:
        raise ModelDirectoryInvalid(
            f"The weights in {directory} are quantized by {method!r}; supported are {' and '.join(DENSE)}. "
            "Use the model's original weights, with --quantization to keep them in few bits."
        )
    settings = {name: value for name, value in options.items() if name != "quant_method"}
    return {"quantization_config": DENSE[method](**{**settings, "dequantize": True})}


def widen(model: Any, dtype: torch.dtype) -> None:
    """Cast weights that were unpacked to a narrower dtype than the dtype in which the model computes.

    transformers before 5.23 unpacks MXFP4 to bfloat16, whatever dtype is requested. bfloat16 holds each value of MXFP4
    exactly, but the layer would also compute in bfloat16: logits of a float32 model had an error of 5e-3.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < torch.finfo(dtype).bits:
            parameter.data = parameter.data.to(dtype)


def _options(config: Any) -> dict[str, Any]:
    declared = getattr(config, "quantization_config", None) or {}
    return dict(declared if isinstance(declared, dict) else declared.to_dict())


def load_to_save(architecture: Any, directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """Return a model that `save_pretrained` writes with dense weights, without traces of its quantized format.

    `architecture` is the transformers class that loads the model.
    """
    options = dequantizing(directory, config)
    model = architecture.from_pretrained(directory, config=config, dtype=dtype, **options)
    if not options:
        return model
    widen(model, dtype)
    # transformers would write the weights back in that format, which it supports for some only.
    for named in (config, config.get_text_config()):
        if getattr(named, "quantization_config", None) is not None:
            del named.quantization_config
    dense = skeleton(config, dtype=dtype)
    dense.load_state_dict(model.state_dict(), assign=True)
    _take_what_no_state_has(dense, model)
    return dense


def _take_what_no_state_has(dense: Any, model: Any) -> None:
    """Copy the parts that no checkpoint holds: other buffers such as frequencies, generation config and mode."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in persistent:
            parent, _, leaf = name.rpartition(".")
            dense.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)
    dense.generation_config = model.generation_config
    dense.train(model.training)
