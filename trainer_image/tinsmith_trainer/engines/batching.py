"""Datums into fixed microbatches, and their tensors. Pure: what a datum meets depends on its own length only.

A microbatch holds datums of one operation. Kernels round differently for other shapes, and a datum's bits must not
depend on its neighbours: so all products of a microbatch take the same number of tokens, which follows from each of
its datums' lengths. There are two ways to lay them out:

- Packed: datums of any length lie one behind the other without padding, and each attends to itself alone.
- In rows of one padded length, for long datums, and for models or devices that cannot keep packed ones apart. Right
  padding with causal attention needs no mask, since no token sees what comes after it.
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
"""Drivers report some 100 MiB more or less of the same GPU, around what it is sold with."""

PACKED_BELOW_TOKENS = 512
"""A longer datum's products are long enough by themselves, and faster than in parts."""
PRODUCT_TOKENS = (64, 128)
"""A packed datum's products take so many tokens: the second from its own number on. Measured on one thread in GFLOP/s,
for 256 x 640: 94 for 16, 168 for 64, 193 for 128, 228 for 1,024."""

CELLS_PER_TOKEN = 4
"""Losses take rows as wide as the longest. Beside one of 127 tokens, hundreds of a token each would be a hundred times
as large as what was sent, and with many targets for each token fill the memory."""

OPEN_GROUPS = 16
"""So that a call of many datums is cut in a time that grows with their number."""

TARGETS = "target_tokens"
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """`lengths`: what is computed for each datum, padding included. `product_tokens`: what a product takes on the CPU.

    `targets` is K for targets `[T, K]`, None for `[T]`. `sees`: it is one datum with images, which is computed alone.
    """

    lengths: tuple[int, ...]
    product_tokens: int
    packed: bool = False
    targets: int | None = None
    sees: bool = False

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
    """The datum of each row, by index within the operation."""

    shape: MicrobatchShape
    datum_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchArrays:
    """`tokens` and `valid` are `[rows, width]`, `targets` `[rows, width]` or `[rows, width, K]`.

    `loss_inputs` are `[rows, width]` or as `targets`, float32; a custom loss's may be int64, and have other columns.
    Padding is 0 and False.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    valid: NDArray[np.bool_]
    loss_inputs: Mapping[str, NDArray[np.float32] | NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Datums that may be in one microbatch. `length`: the padded one, of those in rows. `alone`: it has no other."""

    product_tokens: int
    length: int | None
    targets: int | None
    alone: int | None = None


def padded_length(length: int, max_length: int, angles_change_behind: int | None = None) -> int:
    """The grid point at or above `length`: 16, 32, 48, 64, then four steps from each power of two to the next.

    A sequence is not padded beyond `angles_change_behind`, where a model would turn it by other angles.
    """
    grid = next(point for point in _grid() if point >= length)
    if angles_change_behind is not None and length <= angles_change_behind:
        max_length = min(max_length, angles_change_behind)
    return max(length, min(grid, max_length))


def _grid() -> Iterator[int]:
    yield from (SHORTEST, 32, 48, 64)
    power = 64
    while True:
        yield from (power // 4 * quarters for quarters in (5, 6, 7, 8))
        power *= 2


def counted_gpu_memory(reported_bytes: int) -> int:
    """Return the memory that budgets follow from: the same for each GPU of a kind, whatever its driver takes."""
    return max(1, round(reported_bytes / GPU_MEMORY_STEP_BYTES)) * GPU_MEMORY_STEP_BYTES


def plan_microbatches(
    datums: Sequence[Datum],
    *,
    max_length: int,
    token_budget: int,
    packs: bool = False,
    angles_change_behind: int | None = None,
) -> list[Microbatch]:
    """Cuts one operation's datums, kinds in order of first appearance, microbatches of a kind by their first datums.

    A microbatch has as many datums as the budget has room for, at least one. Where `packs`, it lays short ones out
    packed, the shortest first, so that those of one length attend together.
    """
    kinds: dict[_Kind, list[int]] = {}
    for index, datum in enumerate(datums):
        length = padded_length(datum.length, max_length, angles_change_behind)
        kinds.setdefault(_kind(index, datum, length, packs=packs), []).append(index)
    return [
        _microbatch(kind, group, datums)
        for kind, indices in kinds.items()
        for group in _groups(indices, [kind.length or datums[index].length for index in indices], token_budget)
    ]


def _kind(index: int, datum: Datum, length: int, *, packs: bool) -> _Kind:
    """`length`: the datum's, padded."""
    shape = datum.loss_inputs[TARGETS].shape
    targets = shape[1] if len(shape) == 2 else None
    if datum.images:  # what a vision tower adds is the model's own: no padding, no company
        return _Kind(datum.length, datum.length, targets, alone=index)
    if packs and datum.length < PACKED_BELOW_TOKENS:
        return _Kind(PRODUCT_TOKENS[datum.length >= PRODUCT_TOKENS[1]], None, targets)
    return _Kind(length * max(1, PRODUCT_TOKENS[0] // length), length, targets)


def _groups(indices: Sequence[int], lengths: Sequence[int], token_budget: int) -> Sequence[Sequence[int]]:
    """The longest first, each into the first open group that has room: fewer and fuller ones than in their order.

    A group's indices are in order.
    """
    groups: list[_Group] = []
    for length, index in sorted(zip(lengths, indices, strict=True), key=lambda one: -one[0]):
        group = next((one for one in groups[-OPEN_GROUPS:] if one.has_room(length, token_budget)), None)
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
        lengths, sees = (kind.length,) * len(indices), kind.alone is not None
        shape = MicrobatchShape(lengths, kind.product_tokens, targets=kind.targets, sees=sees)
        return Microbatch(shape, tuple(indices))
    ordered = sorted(indices, key=lambda index: datums[index].length)
    lengths = tuple(datums[index].length for index in ordered)
    return Microbatch(MicrobatchShape(lengths, kind.product_tokens, packed=True, targets=kind.targets), tuple(ordered))


def pad(
    microbatch: Microbatch,
    datums: Sequence[Datum],
    loss_inputs: Sequence[Mapping[str, NDArray[np.float32] | NDArray[np.int64]]],
) -> MicrobatchArrays:
    """The microbatch's arrays. Both sequences cover the whole operation, by datum index."""
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
        if wrong == IGNORED_LABEL:
            raise UserError(
                f"{what} holds {IGNORED_LABEL}; transformers marks labels that do not count with it, and Tinker masks "
                "by weights. Send the token's own id there, and 0 in `weights` (cross_entropy) or `advantages`."
            )
        raise UserError(
            f"{what} holds token id {wrong}; ids of this model are 0 to {vocab_size - 1}. "
            f"Was the datum made with another model's tokenizer?"
        )
