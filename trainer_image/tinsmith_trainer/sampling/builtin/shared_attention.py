"""The attention of rows that share a prompt.

On a CPU a step's attention takes as long as its keys and values take to be read, so a group that reads its prompt
together takes a fraction of the time. Prompt and row are attended to apart, and their results put together by the sums
of their exponentials, as one softmax over both would have it (arXiv 2402.05099).

Products of a group have as many rows as it has samples, so bits depend on company.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """Rows of a forward, one behind the other, that share a prompt."""

    start: int
    end: int
    prefix: SharedPrefix


def prefix_spans(prefixes: Sequence[SharedPrefix | None]) -> list[PrefixSpan]:
    """Of a forward's rows."""
    spans, start = [], 0
    for prefix, same in itertools.groupby(prefixes):
        end = start + len(list(same))
        if prefix is not None:
            spans.append(PrefixSpan(start, end, prefix))
        start = end
    return spans


class SharedAttention:
    """That of a step: a token a row, which sees all of its prompt, and of its own row what the mask says."""

    def __init__(self, spans: Sequence[PrefixSpan]) -> None:
        self._spans = spans

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        *,
        scaling: float,
        **_options: Any,
    ) -> tuple[Tensor, None]:
        """`query` `[rows, heads, 1, d]`, `key` and `value` `[rows, kv_heads, own tokens, d]`."""
        rows, heads, _, width = query.shape
        asked = query.view(rows, key.shape[1], -1, width)  # heads that have a key in common
        attended, sums = _attend(asked, key, value, mask, scaling)
        for span in self._spans:
            together = asked[span.start : span.end].transpose(0, 1)
            keys, values = span.prefix.of_layer(module.layer_idx)
            seen, seen_sums = _attend(together.flatten(1, 2).unsqueeze(0), keys, values, None, scaling)
            seen, seen_sums = seen.view(together.shape), seen_sums.view(together.shape[:3])
            part = torch.sigmoid(seen_sums.transpose(0, 1) - sums[span.start : span.end])
            attended[span.start : span.end].lerp_(seen.transpose(0, 1), part.unsqueeze(-1).to(seen.dtype))
        return attended.reshape(rows, 1, heads, width), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """What attention comes to, `[rows, heads, length, d]`, and the logarithm of its softmax's denominator, without `d`.

    By PyTorch's own kernel for CPUs, which its public function keeps the second of to itself.
    """
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scaling
    )
    return attended, sums
