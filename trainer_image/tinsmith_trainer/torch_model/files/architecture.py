"""The class of transformers that a configuration is loaded with, and a model of it without weights.

Of some whole models, such as Qwen3.5 and Llama 4, transformers loads the text model alone, with its own configuration.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a model: with its vision tower where only that is a whole one."""
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees and not is_text else AutoModelForCausalLM


def architecture_of(config: Any) -> Any:
    """Return the model's class, or None for a configuration that no causal language model has."""
    return auto_class(config)._model_mapping.get(type(config), None)


def loads_text_alone(config: Any) -> bool:
    """Tell whether the text model is loaded out of a whole model."""
    return bool(architecture_of(config).config_class is config.sub_configs.get("text_config"))


def loaded_config(config: Any) -> Any:
    """Return the configuration that AutoModel loads the architecture with.

    AutoModel itself takes no weights without a directory, and in transformers 5.6 makes no text model out of a whole
    model's configuration.
    """
    if not loads_text_alone(config):
        return config
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def skeleton(config: Any, **options: Any) -> Any:
    """Return a model without weights, which takes no memory."""
    with torch.device("meta"):
        return architecture_of(config)._from_config(loaded_config(config), **options)


def outside_of_text(config: Any) -> set[str]:
    """Return the names of the towers and projectors of a whole model."""
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    text = config.sub_configs["text_config"]
    return {name for name, part in whole.base_model.named_children() if type(getattr(part, "config", None)) is not text}
