"""Megatron-Bridge with Megatron's own layers in the place of TransformerEngine's, which is built for CUDA alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any


@contextmanager
def transformer_engine_by_name() -> Iterator[None]:
    """Offer TransformerEngine's names to adapters' modules, which need no class of it. Elsewhere it stays absent."""
    package, inner = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    placeholder_class = type("NotInstalled", (), {})
    vars(package)["pytorch"] = inner
    vars(inner).update(dict.fromkeys(("Linear", "LayerNormLinear", "LayerNorm", "RMSNorm"), placeholder_class))
    vars(inner)["ops"] = ModuleType("transformer_engine.pytorch.ops")
    vars(inner)["ops"].Sequential = placeholder_class
    modules = {package.__name__: package, inner.__name__: inner}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def build_local_layers() -> None:
    """Build local layers for any spec of a model's bridge: the arithmetic is the same, the fusion is not."""
    from megatron.bridge.models import gpt_provider

    gpt_provider.transformer_engine_layer_spec = gpt_provider.local_layer_spec


def adapt_local_layers() -> None:
    """Adapt Megatron's local layers. Megatron-Bridge takes its stand-ins for TransformerEngine's classes."""
    from megatron.bridge.peft import utils

    utils.HAVE_TE = False


def initialize_without_gpu() -> None:
    """Megatron-Bridge's own argument for it, which NeMo RL does not give, and no compiling of fused functions."""
    from megatron.bridge.training import initialize

    def nothing(*_: Any, **__: Any) -> None: ...

    initialize.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize.set_jit_fusion_options = nothing
