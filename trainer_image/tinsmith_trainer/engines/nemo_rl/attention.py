"""Causal attention on the CPU, without the matrix of scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override


class CausalAttention(nn.Module):
    """Stands in for Megatron's DotProductAttention, which keeps `[B, heads, S, S]` for backward.

    Measured with four layers on rows of 2048 tokens, that made a step five times as long as transformers' is.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[S, B, heads, size]`, with as many keys and values as there are groups of queries, to `[S, B, features]`."""
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)
