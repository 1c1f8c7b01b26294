"""Splitting of datums into fixed microbatches, and their tensors. A datum's batching depends only on its own length.

A microbatch holds datums of one operation. A datum's bits must not depend on its neighbours, but kernels round
differently for other shapes. So all products of a microbatch take the same number of tokens. This number follows from
the length of each of its datums. Datums have one of two layouts:

- Packed: datums of any length follow each other without padding, and the tokens of a datum attend only to the same
  datum.
- Rows of one padded length: for long datums, and for models or devices that cannot keep packed datums separate. Right
  padding with causal attention needs no mask, since no token sees later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.errors import UserError

SHORTEST = 16
DEFAULT_TOKEN_BUDGET = 1024
GPU_MEMORY_STEP_BYTES = 2 * 1024**3
"""The step to which a GPU's memory is rounded.

Drivers report the memory of one GPU model with a variation of about 100 MiB.
"""

PACKED_BELOW_TOKENS = 512
"""The length up to which datums are packed.

From this length on, one product for the whole datum is faster than several.
"""
PRODUCT_TOKENS = (64, 128)
"""The number of tokens of a packed datum's products. The second value applies to datums of at least that length.

Measured on one thread, in GFLOP/s for 256 x 640: 94 for 16 tokens, 168 for 64, 193 for 128, 228 for 1,024.
"""

CELLS_PER_TOKEN = 4
"""The limit on padding. Losses take rows as wide as the longest datum.

Without this limit, hundreds of datums of one token each could share a microbatch with a datum of 127 tokens, and grow
to a hundred times their size. With many targets per token, they would fill the memory.
"""

OPEN_GROUPS = 16
"""The number of groups that are searched for room.

With a fixed number, splitting takes time linear in the number of datums.
"""

TARGETS = "target_tokens"
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """The shape of a microbatch.

    `lengths` are the computed tokens of each datum, including its padding. `product_tokens` is the size of a product on
    the CPU. `targets` is K for targets of shape `[T, K]`, and None for `[T]`. `has_images`: the microbatch is one datum
    with images.
    """

    lengths: tuple[int, ...]
    product_tokens: int
    packed: bool = False
    targets: int | None = None
    has_images: bool = False

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch: the datum of each row, by its index within the operation."""

    shape: MicrobatchShape
    datum_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchArrays:
    """The arrays of a microbatch. Padding is 0 in numbers and False in `valid`.

    `tokens` and `valid` are `[rows, width]`, `targets` `[rows, width]` or `[rows, width, K]`. `loss_inputs` are
    float32, `[rows, width]` or in the shape of `targets`. Inputs of a custom loss may be int64, and have another number
    of columns.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    valid: NDArray[np.bool_]
    loss_inputs: Mapping[str, NDArray[np.float32] | NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A key that is equal for datums that may share a microbatch.

    `length` is the padded length of rows, and None for packed datums. `alone` is the index of a datum that must have
    its own microbatch.
    """

    product_tokens: int
    length: int | None
    targets: int | None
    alone: int | None = None


def padded_length(length: int, max_length: int, angles_change_after: int | None = None) -> int:
    """Return the grid point at or above `length`: 16, 32, 48, 64, then four steps per power of two.

    A sequence is not padded beyond `angles_change_after`, because the model uses other rotary angles for longer
    sequences.
    """
    grid = next(point for point in _grid() if point >= length)
    if angles_change_after is not None and length <= angles_change_after:
        max_length = min(max_length, angles_change_after)
    return max(length, min(grid, max_length))


def _grid() -> Iterator[int]:
    yield from (SHORTEST, 32, 48, 64)
    power = 64
    while True:
        yield from (power // 4 * quarters for quarters in (5, 6, 7, 8))
        power *= 2


def counted_gpu_memory(reported_bytes: int) -> int:
    """Return the memory to plan with.

    It is equal for all GPUs of one model, and does not depend on the driver's own use.
    """
    return max(1, round(reported_bytes / GPU_MEMORY_STEP_BYTES)) * GPU_MEMORY_STEP_BYTES


def plan_microbatches(
    datums: Sequence[Datum],
    *,
    max_length: int,
    token_budget: int,
    packs_below: int = 0,
    by_products: bool = True,
    angles_change_after: int | None = None,
) -> list[Microbatch]:
    """Split one operation's datums into microbatches, in a fixed order.

    Kinds are ordered by their first datum, and so are the microbatches of a kind. A microbatch has as many datums as
    the budget allows, but at least one. Datums shorter than `packs_below` are packed, the shortest first, so that
    datums of equal length attend together. `by_products`: packed datums whose products have different sizes are in
    different microbatches, as `numerics: exact` requires.
    """
    kinds: dict[_Kind, list[int]] = {}
    for index, datum in enumerate(datums):
        length = padded_length(datum.length, max_length, angles_change_after)
        kinds.setdefault(_kind(index, datum, length, packs_below, by_products=by_products), []).append(index)
    return [
        _microbatch(kind, group, datums)
        for kind, indices in kinds.items()
        for group in _groups(indices, [kind.length or datums[index].length for index in indices], token_budget)
    ]


def _kind(index: int, datum: Datum, length: int, packs_below: int, *, by_products: bool) -> _Kind:
    """Return a datum's kind. `length` is its padded length."""
    shape = datum.loss_inputs[TARGETS].shape
    targets = shape[1] if len(shape) == 2 else None
    if datum.images:  # a vision tower's features allow neither padding nor other datums
        return _Kind(datum.length, datum.length, targets, alone=index)
    if datum.length < packs_below:
        is_long = by_products and datum.length >= PRODUCT_TOKENS[1]
        return _Kind(PRODUCT_TOKENS[is_long], None, targets)
    return _Kind(length * max(1, PRODUCT_TOKENS[0] // length), length, targets)


def _groups(indices: Sequence[int], lengths: Sequence[int], token_budget: int) -> Sequence[Sequence[int]]:
    """Group datums. Take the longest first, and put each into the first open group with room.

    This gives fewer and fuller groups than the datums' own order. The indices of a group are sorted.
    """
    groups: list[_Group] = []
    for length, index in sorted(zip(lengths, indices, strict=True), key=lambda item: -item[0]):
        group = next((each for each in groups[-OPEN_GROUPS:] if each.has_room(length, token_budget)), None)
        if group is None:
            groups.append(group := _Group(widest=length))
        group.indices.append(index)
        group.tokens += length
    return sorted(sorted(group.indices) for group in groups)


@dataclass(slots=True)
class _Group:
    widest: int
    tokens: int = 0
    indices: list[int] = field(default_factory=list)

    def has_room(self, length: int, token_budget: int) -> bool:
        cells = (len(self.indices) + 1) * self.widest
        return self.tokens + length <= token_budget and cells <= CELLS_PER_TOKEN * token_budget


def _microbatch(kind: _Kind, indices: Sequence[int], datums: Sequence[Datum]) -> Microbatch:
    if kind.length is not None:
        lengths, has_images = (kind.length,) * len(indices), kind.alone is not None
        shape = MicrobatchShape(lengths, kind.product_tokens, targets=kind.targets, has_images=has_images)
        return Microbatch(shape, tuple(indices))
    ordered = sorted(indices, key=lambda index: datums[index].length)
    lengths = tuple(datums[index].length for index in ordered)
    return Microbatch(MicrobatchShape(lengths, kind.product_tokens, packed=True, targets=kind.targets), tuple(ordered))


def pad(
    microbatch: Microbatch,
    datums: Sequence[Datum],
    loss_inputs: Sequence[Mapping[str, NDArray[np.float32] | NDArray[np.int64]]],
) -> MicrobatchArrays:
    """Return the microbatch's arrays. Both sequences have one entry for each datum of the operation."""
    shape = microbatch.shape
    plane = (shape.rows, shape.width)
    target_plane = plane if shape.targets is None else (*plane, shape.targets)
    tokens = np.zeros(plane, np.int64)
    targets = np.zeros(target_plane, np.int64)
    valid = np.zeros(plane, np.bool_)
    padded: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
    for row, index in enumerate(microbatch.datum_indices):
        datum = datums[index]
        tokens[row, : datum.length] = datum.tokens
        targets[row, : datum.length] = datum.loss_inputs[TARGETS]
        valid[row, : datum.length] = True
        for name, values in loss_inputs[index].items():
            plane_of_input = padded.setdefault(name, np.zeros((*plane, *values.shape[1:]), values.dtype))
            plane_of_input[row, : datum.length] = values
    return MicrobatchArrays(tokens, targets, valid, padded)


def check_tokens(datums: Sequence[Datum], *, vocab_size: int, max_length: int) -> None:
    """Raise UserError for no datums, for an empty or too long datum, and for ids outside the vocabulary."""
    if not datums:
        raise UserError("The call holds no datums; send at least one.")
    for index, datum in enumerate(datums):
        if datum.length == 0:
            raise UserError(f"Datum {index} has no tokens; every datum needs at least one.")
        if datum.length > max_length:
            raise UserError(
                f"Datum {index} has {datum.length} tokens; the limit of this model is {max_length}. Shorten the datum."
            )
        _check_ids(datum.tokens, f"Datum {index}: model_input", vocab_size)
        _check_ids(datum.loss_inputs[TARGETS], f"Datum {index}: {TARGETS}", vocab_size)


def _check_ids(ids: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32], what: str, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = next(int(i) for i in ids.flat if not 0 <= i < vocab_size)
        if wrong == IGNORED_LABEL:
            raise UserError(
                f"{what} holds {IGNORED_LABEL}, which transformers uses for ignored labels; Tinker masks by weights. "
                "Send the token's id there, and 0 in `weights` (cross_entropy) or `advantages`."
            )
        raise UserError(
            f"{what} holds token id {wrong}; ids of this model are 0 to {vocab_size - 1}. "
            f"Was the datum made with another model's tokenizer?"
        )
