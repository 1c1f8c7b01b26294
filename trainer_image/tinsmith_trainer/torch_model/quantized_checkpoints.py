"""Checkpoints whose files hold quantized weights: which are read, and how.

gpt-oss comes in MXFP4, DeepSeek V3 in FP8 with scales by blocks. Both are made dense as they are read, in the dtype
that is computed with, so that engine and sampler see the weights of any other model. Other formats are refused.
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
    """By the name that transformers has for it; empty: the files hold dense weights."""
    return str(_options(config).get("quant_method", ""))


def dequantizing(directory: Path, config: Any) -> dict[str, Any]:
    """More arguments for transformers' loading; none for a checkpoint that is not quantized.

    Raises ModelDirectoryInvalid for a format that is not read here.
    """
    options, method = _options(config), stored_format(config)
    if not method:
        return {}
    if method not in DENSE:
        raise ModelDirectoryInvalid(
            f"The weights in {directory} are quantized by {method!r}, and only {' and '.join(DENSE)} are read here. "
            "Give the model's original weights, and --quantization to keep them in few bits."
        )
    given = {name: value for name, value in options.items() if name != "quant_method"}
    return {"quantization_config": DENSE[method](**{**given, "dequantize": True})}


def widen(model: Any, dtype: torch.dtype) -> None:
    """Cast the weights that were made dense in a narrower dtype than the model computes in.

    transformers before 5.23 makes MXFP4 dense in bfloat16, whatever it was asked for. That holds each value of MXFP4
    exactly, but the layer would compute in it: logits of a float32 model were 5e-3 off.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < torch.finfo(dtype).bits:
            parameter.data = parameter.data.to(dtype)


def _options(config: Any) -> dict[str, Any]:
    said = getattr(config, "quantization_config", None) or {}
    return dict(said if isinstance(said, dict) else said.to_dict())


def load_to_save(architecture: Any, directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """A model that `save_pretrained` writes dense, without a word of the format that it was in.

    `architecture`: which of transformers' classes for it.
    """
    options = dequantizing(directory, config)
    model = architecture.from_pretrained(directory, config=config, dtype=dtype, **options)
    if not options:
        return model
    widen(model, dtype)
    # transformers would write the weights back in that format, which it can for some only: so they change their model.
    for named in (config, config.get_text_config()):
        if getattr(named, "quantization_config", None) is not None:
            del named.quantization_config
    dense = skeleton(config, dtype=dtype)
    dense.load_state_dict(model.state_dict(), assign=True)
    _take_what_no_state_has(dense, model)
    return dense


def _take_what_no_state_has(dense: Any, model: Any) -> None:
    """Buffers that are in no checkpoint, such as the frequencies of positions; how to generate; and evaluation."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in persistent:
            parent, _, leaf = name.rpartition(".")
            dense.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)
    dense.generation_config = model.generation_config
    dense.train(model.training)
