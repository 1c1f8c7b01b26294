"""Which of transformers' attention functions a model is loaded with."""

from __future__ import annotations

from typing import Any

import structlog
from transformers import AutoModelForCausalLM

log = structlog.get_logger(__name__)

SDPA, EAGER = "sdpa", "eager"


def attention_for(config: Any) -> str:
    """PyTorch's own, or plain products for an architecture that it does not cover: with sinks, or capped scores."""
    architecture = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if architecture is None or architecture._supports_sdpa:
        return SDPA
    log.info("attention by plain products: the architecture has none by PyTorch's", model=architecture.__name__)
    return EAGER
