"""Datums into fixed microbatches, and their tensors. Pure: what a datum meets depends on its own shape only.

A microbatch holds datums of one operation that share a padded length, and no empty rows. Kernels round differently for
other shapes, and a datum's bits must not depend on how many neighbours it has: so whoever multiplies takes as many
tokens at a time as follow from that length. Right padding with causal attention needs no mask, since no token sees
what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.errors import UserError

SHORTEST = 16
DEFAULT_TOKEN_BUDGET = 1024

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """`targets` is K for targets `[T, K]`, None for `[T]`."""

    rows: int
    length: int
    targets: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The datum of each row, by index within the operation."""

    shape: MicrobatchShape
    datum_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchArrays:
    """`tokens` and `valid` are `[rows, length]`, `targets` `[rows, length]` or `[rows, length, K]`.

    `loss_inputs` are float32, `[rows, length]` or as `targets`. Padding is 0 and False.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    valid: NDArray[np.bool_]
    loss_inputs: Mapping[str, NDArray[np.float32]]


def padded_length(length: int, max_length: int) -> int:
    """The grid point at or above `length`: 16, 32, 48, 64, then four steps from each power of two to the next."""
    grid = next(point for point in _grid() if point >= length)
    return max(length, min(grid, max_length))


def _grid() -> Iterator[int]:
    yield from (SHORTEST, 32, 48, 64)
    power = 64
    while True:
        yield from (power // 4 * quarters for quarters in (5, 6, 7, 8))
        power *= 2


def plan_microbatches(datums: Sequence[Datum], *, max_length: int, token_budget: int) -> list[Microbatch]:
    """Cuts one operation's datums, shapes in order of first appearance, datums in order within a shape.

    A microbatch has as many rows as the budget has room for, at least one.
    """
    buckets: dict[tuple[int, int | None], list[int]] = {}
    for index, datum in enumerate(datums):
        targets = datum.loss_inputs[TARGETS]
        shape = (padded_length(datum.length, max_length), targets.shape[1] if targets.ndim == 2 else None)
        buckets.setdefault(shape, []).append(index)
    return [
        Microbatch(MicrobatchShape(len(rows), length, targets), tuple(rows))
        for (length, targets), indices in buckets.items()
        for rows in batched(indices, max(1, token_budget // length))
    ]


def batched(items: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """As itertools.batched of Python 3.12."""
    return (items[start : start + most] for start in range(0, len(items), most))


def pad(
    microbatch: Microbatch, datums: Sequence[Datum], loss_inputs: Sequence[Mapping[str, NDArray[np.float32]]]
) -> MicrobatchArrays:
    """The microbatch's arrays. Both sequences cover the whole operation, by datum index."""
    shape = microbatch.shape
    plane = (shape.rows, shape.length)
    target_plane = plane if shape.targets is None else (*plane, shape.targets)
    tokens = np.zeros(plane, np.int64)
    targets = np.zeros(target_plane, np.int64)
    valid = np.zeros(plane, np.bool_)
    padded: dict[str, NDArray[np.float32]] = {}
    for row, index in enumerate(microbatch.datum_indices):
        datum = datums[index]
        tokens[row, : datum.length] = datum.tokens
        targets[row, : datum.length] = datum.loss_inputs[TARGETS]
        valid[row, : datum.length] = True
        for name, values in loss_inputs[index].items():
            plane_of_input = padded.setdefault(name, np.zeros((*plane, *values.shape[1:]), np.float32))
            plane_of_input[row, : datum.length] = values
    return MicrobatchArrays(tokens, targets, valid, padded)


def check_tokens(datums: Sequence[Datum], *, vocab_size: int, max_length: int) -> None:
    """Refuses what no engine can run: no datums, empty or too long ones, ids outside the vocabulary."""
    if not datums:
        raise UserError("The call holds no datums; send at least one.")
    for index, datum in enumerate(datums):
        if datum.length == 0:
            raise UserError(f"Datum {index} has no tokens; every datum needs at least one.")
        if datum.length > max_length:
            raise UserError(
                f"Datum {index} has {datum.length} tokens; this model takes at most {max_length}. Shorten the datum."
            )
        _check_ids(datum.tokens, f"Datum {index}: model_input", vocab_size)
        _check_ids(datum.loss_inputs[TARGETS], f"Datum {index}: {TARGETS}", vocab_size)


def _check_ids(ids: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32], what: str, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = next(int(i) for i in ids.flat if not 0 <= i < vocab_size)
        raise UserError(
            f"{what} holds token id {wrong}; ids of this model are 0 to {vocab_size - 1}. "
            f"Was the datum made with another model's tokenizer?"
        )
