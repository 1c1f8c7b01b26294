"""Attention of our own within transformers' models, where a forward asks for it.

Transformers' models call their attention through a table of functions. Ours, in the place of `sdpa`, hands every call
on: to transformers' own, or for the time of a forward, in its thread, to another.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

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


BLOCK_QUERIES = 64
"""At least, where a sequence has them. Of 32, 64, 96, 128 and 192 the fastest for nearly all lengths."""


def filled_up_length(length: int) -> int:
    """Short ones to a multiple of 16."""
    return -(-length // 16) * 16 if length <= 64 else length


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences from row `start` on, one behind the other, which are filled up to one length."""

    start: int
    lengths: Sequence[int]
    filled: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + sum(self.lengths))

    @property
    def is_even(self) -> bool:
        return all(length == self.filled for length in self.lengths)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Where each begins and ends; what is too short for one belongs to the last."""
        ends = [*range(BLOCK_QUERIES, self.filled - BLOCK_QUERIES + 1, BLOCK_QUERIES), self.filled]
        return itertools.pairwise([0, *ends])

    def of(self, states: Tensor) -> Tensor:
        """`[sequences, filled, heads, d]` of `[tokens, heads, d]`, zeros behind each sequence."""
        own = states[self.rows]
        if self.is_even:
            return torch.unflatten(own, 0, (-1, self.filled))
        longest = pad_sequence(list(torch.split(own, list(self.lengths))), batch_first=True)
        return functional.pad(longest, (0, 0, 0, 0, 0, self.filled - longest.shape[1]))

    def place_of(self, states: Tensor) -> Tensor:
        """Where to write what `put` then puts into `states`: in it already, where nothing has to be cut off."""
        if self.is_even:
            return torch.unflatten(states[self.rows], 0, (-1, self.filled))
        return states.new_empty((len(self.lengths), self.filled, *states.shape[1:]))

    def put(self, states: Tensor, own: Tensor) -> None:
        """The other way round than `of`."""
        if self.is_even:
            return
        parts = torch.split(states[self.rows], list(self.lengths))
        for part, sequence in zip(parts, own.unbind(), strict=True):
            part.copy_(sequence[: len(part)])


def _batches(lengths: Sequence[int]) -> Iterator[_Batch]:
    start = 0
    for filled, own in itertools.groupby(lengths, filled_up_length):
        batch = _Batch(start, list(own), filled)
        yield batch
        start = batch.rows.stop


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """`[tokens, heads, d_value]` of query `[tokens, heads, d]`, and of key and value of as many heads or a divisor.

    The tokens are those of sequences of `lengths`; what is behind them attends to nothing, and comes out as zeros.
    """
    attended: Tensor = _BlockedAttention.apply(query, key, value, list(_batches(lengths)), scale)
    return attended


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, batches: Sequence[_Batch], scale: float) -> Tensor:
        attended = _to_write(batches, (*query.shape[:2], value.shape[2]))
        weights = []
        for batch in batches:
            queries = _by_shared_keys(batch.of(query), key.shape[1])
            keys, values = _by_head(batch.of(key)).mul_(scale), _by_head(batch.of(value))
            place = batch.place_of(attended)
            by_shared_keys = _by_shared_keys(place, key.shape[1])
            for start, end in batch.blocks():
                weights.append(_weights(_rows(queries, start, end), keys[:, :end], end - start))
                _set_rows(by_shared_keys, start, end, torch.bmm(weights[-1], values[:, :end]))
            batch.put(attended, place)
        ctx.batches, ctx.scale = batches, scale
        ctx.save_for_backward(query, key, value, *weights)
        return attended

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *weights = ctx.saved_tensors
        grads = [_to_write(ctx.batches, states.shape) for states in (query, key, value)]
        first = 0
        for batch in ctx.batches:
            places = [batch.place_of(whole) for whole in grads]
            blocks = list(zip(batch.blocks(), weights[first:], strict=False))
            first += len(blocks)
            _write_gradients(places, [batch.of(states) for states in (query, key, value, grad)], blocks, ctx.scale)
            for whole, own in zip(grads, places, strict=True):
                batch.put(whole, own)
        return *grads, None, None


def _to_write(batches: Sequence[_Batch], shape: Sequence[int]) -> Tensor:
    """Zeros behind all sequences."""
    states = torch.empty(shape)
    states[batches[-1].rows.stop :] = 0
    return states


def _write_gradients(
    places: Sequence[Tensor], states: Sequence[Tensor], blocks: Sequence[tuple[tuple[int, int], Tensor]], scale: float
) -> None:
    """Of a batch's queries, keys and values, from these and the gradient of what they attended to.

    `[sequences, filled, heads, d]` each. The last block comes first, since it is the one that sees all keys.
    """
    key_heads = states[1].shape[2]
    queries, grads, of_queries = (_by_shared_keys(one, key_heads) for one in (states[0], states[3], places[0]))
    keys, values = _by_head(states[1]).mul_(scale), _by_head(states[2])
    of_keys = of_values = None
    for (start, end), weights in reversed(blocks):
        own, own_grad = _rows(queries, start, end), _rows(grads, start, end)
        of_weights = torch.bmm(own_grad, values[:, :end].mT)
        of_scores = torch.ops.aten._softmax_backward_data.default(of_weights, weights, -1, weights.dtype)
        _set_rows(of_queries, start, end, torch.bmm(of_scores, keys[:, :end]))
        of_values = _added(of_values, torch.bmm(weights.mT, own_grad))
        of_keys = _added(of_keys, torch.bmm(of_scores.mT, own))
    assert of_keys is not None
    assert of_values is not None
    for place, by_head in zip(places[1:], (of_keys.mul_(scale), of_values), strict=True):
        place.copy_(torch.unflatten(by_head, 0, (-1, key_heads)).transpose(1, 2))


def _added(sums: Tensor | None, of_first: Tensor) -> Tensor:
    """To the sums of the first tokens; there are none yet of what sees all of them."""
    if sums is None:
        return of_first
    sums[:, : of_first.shape[1]].add_(of_first)
    return sums


def _weights(queries: Tensor, keys: Tensor, block: int) -> Tensor:
    """`[heads, rows, keys]`: of each row's token up to itself. The last `block` keys are the block's own."""
    scores = torch.bmm(queries, keys.mT)
    torch.unflatten(scores, 1, (-1, block))[..., -block:].masked_fill_(_later_keys(block), -torch.inf)
    return torch.softmax(scores, -1)


@functools.cache
def _later_keys(block: int) -> Tensor:
    """Of fewer than 2 * BLOCK_QUERIES sizes."""
    return torch.ones((block, block), dtype=torch.bool).triu_(1)


def _by_shared_keys(states: Tensor, key_heads: int) -> Tensor:
    """A view `[sequences, key_heads, heads of each, length, d]` of `[sequences, length, heads, d]`."""
    return torch.unflatten(states, 2, (key_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_head(states: Tensor) -> Tensor:
    """A copy `[sequences * heads, length, d]` of `[sequences, length, heads, d]`."""
    return states.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(0, 1)


def _rows(states: Tensor, start: int, end: int) -> Tensor:
    """`[sequences * key_heads, rows, d]`: some tokens of all heads that share their keys, one head after the other."""
    return states[:, :, :, start:end].flatten(0, 1).flatten(1, 2)


def _set_rows(states: Tensor, start: int, end: int, rows: Tensor) -> None:
    states[:, :, :, start:end] = rows.view(*states.shape[:3], end - start, -1)
