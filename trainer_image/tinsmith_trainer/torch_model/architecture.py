"""The transformers class of a configuration, a model of this class without weights, and the transform of its logits.

For some models with several modalities, such as Qwen3.5 and Llama 4, transformers loads only the text model, with a
separate configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


def auto_class(config: Any) -> Any:
    """Return transformers' class for a model.

    A class with a vision tower is returned only if the model has no text class.
    """
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees and not is_text else AutoModelForCausalLM


def architecture_of(config: Any) -> Any:
    """Return the model's class, or None if the configuration belongs to no causal language model."""
    return auto_class(config)._model_mapping.get(type(config), None)


def loads_text_alone(config: Any) -> bool:
    """Return whether transformers loads only the text model of a model with several modalities."""
    return bool(architecture_of(config).config_class is config.sub_configs.get("text_config"))


def loaded_config(config: Any) -> Any:
    """Return the configuration with which AutoModel loads the architecture.

    AutoModel itself needs a directory with weights. In transformers 5.6, AutoModel makes no text model from the
    configuration of the whole model.
    """
    if not loads_text_alone(config):
        return config
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def skeleton(config: Any, **options: Any) -> Any:
    """Return a model without weights. The tensors of the model take no memory."""
    with torch.device("meta"):
        return architecture_of(config)._from_config(loaded_config(config), **options)


def outside_of_text(config: Any) -> set[str]:
    """Return the names of the towers and projectors that a whole model has and the text model lacks."""
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    text = config.sub_configs["text_config"]
    return {name for name, part in whole.base_model.named_children() if type(getattr(part, "config", None)) is not text}


FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping",)
"""The names of the soft cap in transformers' configurations."""
MULTIPLIED_DESPITE_THE_NAME = ("hyperclovax",)
"""Model types in which `logits_scaling` is a factor.

In Granite, where the name comes from, `logits_scaling` is a divisor.
"""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The scaling of logits by a factor, with an optional soft cap.

    A logit `z` becomes `scale * z`, or, with a cap, `cap * tanh(scale * z / cap)`.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits of the same shape and dtype. If nothing changes, return `logits` itself.

        `logits` is never modified.
        """
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


def logit_transform_of(config: Any) -> LogitTransform:
    """Return the transform that a transformers configuration describes.

    `check_architecture` tests whether the model changes logits in any other way.
    """
    text = config.get_text_config()
    divides = text.model_type not in MULTIPLIED_DESPITE_THE_NAME
    scale = _product(text, FACTORS) * (_product(text, DIVISORS) ** (-1 if divides else 1))
    cap = next((float(value) for name in CAPS if (value := getattr(text, name, None))), None)
    return LogitTransform(scale, cap)


def _product(config: Any, names: tuple[str, ...]) -> float:
    product = 1.0
    for name in names:
        value = getattr(config, name, None)
        product *= 1.0 if value is None else float(value)
    return product
