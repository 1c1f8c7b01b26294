"""Keys and values of sequences, in the shape that a transformers model's attention writes and reads.

One tensor holds all layers, `[layers, 2, rows, kv_heads, extent, head_dim]`, so one operation copies a row. The views
in this module replace a transformers `Cache`. A model calls only the `update` method, because every forward passes
positions and masks.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

LEAST_MAPPED_BYTES = 1 << 20


class RowGeometry(Protocol):
    """The memory that sequences take, and the device of this memory."""

    @property
    def device(self) -> torch.device: ...

    def row_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of this many tokens."""

    def tokens_in(self, nbytes: int) -> int:
        """Return the length of the longest sequence that fits in this many bytes, or 0 if no sequence fits."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The sizes of the keys and values that a model keeps per token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def row_bytes(self, tokens: int) -> int:
        return tokens * self.bytes_per_token

    def tokens_in(self, nbytes: int) -> int:
        return nbytes // self.bytes_per_token

    def allocate(self, rows: int, extent: int) -> Tensor:
        """Allocate zeros `[layers, 2, rows, kv_heads, extent, head_dim]`.

        On a CPU, memory is used only after the first write.
        """
        shape = (self.layers, 2, rows, self.kv_heads, extent, self.head_dim)
        nbytes = rows * extent * self.bytes_per_token
        if self.device.type != "cpu" or nbytes < LEAST_MAPPED_BYTES:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # The system provides zeroed pages at the first write. PyTorch would write all pages at once.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The next part of one sequence to compute, with the sequence's keys and values `[layers, 2, 1, ...]`."""

    kv: Tensor
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedPrefix:
    """Keys and values of a prompt for all samples of the prompt, `[layers, 2, 1, kv_heads, at least tokens, head_dim]`.

    `serial` is unique.
    """

    kv: Tensor
    tokens: int
    serial: int

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values, each `[1, kv_heads, tokens, head_dim]`."""
        return self.kv[layer, 0, :, :, : self.tokens], self.kv[layer, 1, :, :, : self.tokens]


class BlockView:
    """A view of the next `length` tokens of one sequence, which attend to all earlier tokens."""

    is_compileable = False

    def __init__(self, kv: Tensor, start: int, length: int) -> None:
        self._kv = kv
        self._start = start
        self._end = start + length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store `[1, kv_heads, length, head_dim]`. Return all positions up to the end of the stored positions."""
        self._kv[layer, 0, :, :, self._start : self._end] = keys
        self._kv[layer, 1, :, :, self._start : self._end] = values
        return self._kv[layer, 0, :, :, : self._end], self._kv[layer, 1, :, :, : self._end]


class PromptsView:
    """A view of the next tokens of several sequences, which have separate tensors.

    Tokens after a part's end are padding.
    """

    is_compileable = False

    def __init__(self, parts: Sequence[PromptPart]) -> None:
        self._parts = parts
        self._extent = max(part.end for part in parts)
        self._all_new = not any(part.start for part in parts)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store `[rows, kv_heads, length, head_dim]`. Return all positions up to the end of the longest row."""
        for row, part in enumerate(self._parts):
            for side, states in enumerate((keys, values)):
                part.kv[layer, side, 0, :, part.start : part.end] = states[row, :, : part.length]
        return (keys, values) if self._all_new else (self._seen(keys, layer, 0), self._seen(values, layer, 1))

    def _seen(self, like: Tensor, layer: int, side: int) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0].kv[layer, side, :, :, : self._extent]
        seen = like.new_zeros((like.shape[0], like.shape[1], self._extent, like.shape[3]))
        for row, part in enumerate(self._parts):
            seen[row, :, : part.end] = part.kv[layer, side, 0, :, : part.end]
        return seen


class StepView:
    """A view of the next token of each row. Positions may differ between rows.

    `rows` are row numbers in the batch; by default the first rows.
    """

    is_compileable = False

    def __init__(self, kv: Tensor, positions: Tensor, extent: int, rows: Tensor | None = None) -> None:
        self._kv = kv
        self._chosen = rows
        self._rows = (torch.arange(len(positions), device=kv.device) if rows is None else rows)[:, None]
        self._positions = positions
        self._extent = extent

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store `[rows, kv_heads, 1, head_dim]`. Return the first `extent` tokens of the rows."""
        for side, states in enumerate((keys, values)):
            self._kv[layer, side][self._rows, :, self._positions] = states.transpose(1, 2)
        return self._seen(layer, 0), self._seen(layer, 1)

    def _seen(self, layer: int, side: int) -> Tensor:
        seen = self._kv[layer, side, :, :, : self._extent]
        return seen[: len(self._positions)] if self._chosen is None else seen.index_select(0, self._chosen)


class GeometryProbe:
    """A cache that finds the geometry of a model in one forward."""

    is_compileable = False

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size, torch.dtype]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.shapes[layer] = (keys.shape, values.shape, keys.dtype)
        return keys, values

    def geometry(self, device: torch.device) -> KvGeometry | None:
        """Return the geometry. Return None if layers differ in shape, or if keys differ in shape from values."""
        if len(set(self.shapes.values())) != 1 or sorted(self.shapes) != list(range(len(self.shapes))):
            return None
        keys, values, dtype = self.shapes[0]
        return KvGeometry(len(self.shapes), keys[1], keys[3], dtype, device) if keys == values else None
