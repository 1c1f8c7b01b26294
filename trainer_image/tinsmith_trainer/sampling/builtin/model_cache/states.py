"""The contents of a transformers cache for sequences.

The contents can be copied, moved, split, and combined as rows of one forward.

Caches have many kinds of states: keys and values of all tokens or of a window, convolutions, recurrent states,
compressed or indexed keys. In each kind of state, the first dimension of every tensor is the row. So a cache is treated
as a tree of tensors. For each loaded model, a trial checks that this treatment works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

HOLDERS: tuple[type, ...] = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
if hasattr(cache_utils, "DummyLayer"):  # transformers up to 5.20, which all GPU images have, lacks such layers
    HOLDERS += (cache_utils.DummyLayer,)


class UnlikeStates(Exception):
    """An error for states that cannot be rows of one forward."""


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """The memory of a sequence: a number of bytes per token, and a fixed number of bytes."""

    bytes_per_token: int
    bytes_per_row: int
    device: torch.device

    def row_bytes(self, tokens: int) -> int:
        return self.bytes_per_row + tokens * self.bytes_per_token

    def tokens_in(self, nbytes: int) -> int:
        return max(0, nbytes - self.bytes_per_row) // max(1, self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """A cache of `rows` sequences with `tokens` each.

    Later forwards change the cache, and may also change the tensors in the cache.
    """

    cache: Any
    tokens: int
    rows: int = 1

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.cache))

    def clone(self) -> SequenceStates:
        """Return a copy that shares no memory with the original."""
        return SequenceStates(_mapped(self.cache, Tensor.clone), self.tokens, self.rows)

    def to(self, device: torch.device | str) -> SequenceStates:
        """Return the states on a device. States that are already on this device are not copied."""
        return SequenceStates(_mapped(self.cache, lambda tensor: tensor.to(device)), self.tokens, self.rows)

    def split(self) -> list[SequenceStates]:
        """Return the rows as separate states in the same memory."""
        return [
            SequenceStates(_mapped(self.cache, partial(_row, row, self.rows)), self.tokens) for row in range(self.rows)
        ]


def together(states: Sequence[SequenceStates]) -> SequenceStates:
    """Copy single rows into one cache. Raises UnlikeStates if the rows differ in length or kind."""
    return SequenceStates(_joined([one.cache for one in states]), states[0].tokens, len(states))


def _row(row: int, rows: int, tensor: Tensor) -> Tensor:
    """Return one row. A layer that has had no input may have a tensor without rows."""
    return tensor[row : row + 1] if len(tensor) == rows else tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value).values():
        yield from _tensors(part)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply the function `change` to all tensors that have rows.

    A tensor without dimensions is one number for all rows, and stays unchanged.
    """
    if isinstance(value, Tensor):
        return change(value) if value.ndim else value
    return _rebuilt(value, {name: _mapped(part, change) for name, part in _parts(value).items()})


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise UnlikeStates
    if isinstance(first, Tensor):
        if any(value.shape[1:] != first.shape[1:] for value in values):
            raise UnlikeStates
        return torch.cat(list(values)) if first.ndim else first
    parts = [_parts(value) for value in values]
    if any(part.keys() != parts[0].keys() for part in parts) or (not parts[0] and any(v != first for v in values)):
        raise UnlikeStates
    return _rebuilt(first, {name: _joined([part[name] for part in parts]) for name in parts[0]})


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of a value by name. The result is empty if the value holds no tensors."""
    if isinstance(value, HOLDERS):
        return dict(vars(value))
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, HOLDERS):
        twin = copy.copy(value)
        vars(twin).update(parts)
        return twin
    if isinstance(value, dict):
        return parts
    return type(value)(parts.values()) if isinstance(value, (list, tuple)) and parts else value
