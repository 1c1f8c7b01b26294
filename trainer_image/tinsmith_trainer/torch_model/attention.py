"""Attention of our own within transformers' models, where a forward asks for it.

Transformers' models call their attention through a table of functions. Ours, in the place of `sdpa`, hands every call
on: to transformers' own, or for the time of a forward, in its thread, to another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attention = Callable[..., tuple[Tensor, None]]
"""Takes the module, and of it query, key and value `[rows, heads, length, d]`, the mask or None, and options by name;
returns `[rows, length, heads, d]`."""

_current = threading.local()


@contextmanager
def attending_by(attention: Attention) -> Iterator[None]:
    """In this thread. Contexts within another one are not meant."""
    _current.attention = attention
    try:
        yield
    finally:
        _current.attention = None


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' own."""
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return attended


def _attention(module: nn.Module, *states: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    attention: Attention = getattr(_current, "attention", None) or plain_attention
    return attention(module, *states, **options)


ALL_ATTENTION_FUNCTIONS.register("sdpa", _attention)
