"""Attention over context ranks and packed sequences, which Megatron leaves to TransformerEngine's kernels.

Keys and values of all context ranks are gathered, and every query attends to those before it in its own sequence: the
plain formula. Which tokens of a sequence a rank has is Megatron's convention: of 2 x ranks equal pieces, its own from
either end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor


def attend_over_context_ranks() -> None:
    """Attend over context ranks, where there are any: without them NeMo RL's workers pack nothing."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    make, attend = DotProductAttention.__init__, DotProductAttention.forward

    def make_for_context_ranks(layer: Any, config: Any, *args: Any, **named: Any) -> None:
        """Refused there, where it is not known that this stands for the kernels."""
        ranks, config.context_parallel_size = config.context_parallel_size, 1
        try:
            make(layer, config, *args, **named)
        finally:
            config.context_parallel_size = ranks

    def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        packed = named.get("packed_seq_params")
        if packed is None:
            return attend(layer, query, key, value, *args, **named)
        return _packed(query, key, value, packed, layer.softmax_scale)

    DotProductAttention.__init__ = make_for_context_ranks
    DotProductAttention.forward = forward


def _packed(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    """`[t, heads, size]` of this rank's tokens, those of one sequence after another's -> `[t, heads * size]`."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    own = ((ends[1:] - ends[:-1]) // group.size()).tolist()
    all_keys, all_values = (_Gathered.apply(tensor, group).unbind(0) for tensor in (key, value))
    attended, start = [], 0
    for length in own:
        here = slice(start, start + length)
        attended.append(
            _causal(
                query[here],
                torch.cat([keys[here] for keys in all_keys]),
                torch.cat([values[here] for values in all_values]),
                [_positions(length, rank, group.size()) for rank in range(group.size())],
                group.rank(),
                scale,
            )
        )
        start += length
    return torch.cat(attended).flatten(1)


def _positions(own: int, rank: int, ranks: int) -> Tensor:
    """Return the positions in its sequence of the tokens that a rank has of it."""
    piece = own // 2
    last = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(at * piece, (at + 1) * piece) for at in (rank, last)])


def _causal(query: Tensor, key: Tensor, value: Tensor, positions: list[Tensor], rank: int, scale: float) -> Tensor:
    visible = positions[rank][:, None] >= torch.cat(positions)[None, :]
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    found = torch.nn.functional.scaled_dot_product_attention(
        *(tensor[None] for tensor in heads_first), attn_mask=visible, scale=scale, enable_gqa=True
    )
    return found[0].transpose(0, 1)


class _Gathered(torch.autograd.Function):
    """A tensor of all ranks, stacked. Each rank's gradient of its own is the sum of what all had of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.contiguous()
        torch.distributed.all_reduce(whole, group=ctx.group)
        return whole[ctx.group.rank()], None
