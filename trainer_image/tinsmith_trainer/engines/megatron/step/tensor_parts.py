"""The division of an adapter's whole tensors into parts for the ranks, and the inverse.

Parts are padded to the largest rank of any adapter: A is `[max_rank, d_in]` and B is `[d_out, max_rank]`; for a
mixture's experts, A and B have a further first dimension, `experts` or 1. Values beyond the adapter's rank, or beyond
the end of a dimension that tensor ranks divide, are zero. The tensors of modules that the adapter does not train are
zero, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinsmith_trainer.engines.megatron.parallelism import Coordinates, Parallelism

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rank's part of `<module>.lora_A` or `<module>.lora_B`, with the shape of the part, including padding.

    `split` is the dimension that the ranks of tensor or expert parallelism (`among`) divide equally. If `split` is
    None, each rank holds the whole tensor. `whole_shape` is the shape in the whole model with the largest rank; the
    parts may be longer in total.
    """

    name: str
    shape: Shape
    split: int | None
    whole_shape: Shape
    among: Literal["tensor", "expert"] = "tensor"


def whole_shapes(parts: Sequence[Sequence[TensorPart]], modules: Sequence[str], rank: int) -> dict[str, Shape]:
    """Return the shapes of an adapter with this LoRA rank: modules in order, A before B.

    `parts` are the parts of all ranks.
    """
    padded = {part.name: part.whole_shape for held in parts for part in held}
    shapes: dict[str, Shape] = {}
    for module in modules:
        *experts, _, d_in = padded[f"{module}.lora_A"]
        shapes[f"{module}.lora_A"] = (*experts, rank, d_in)
        shapes[f"{module}.lora_B"] = (*padded[f"{module}.lora_B"][:-1], rank)
    return shapes


def cut(whole: Tensors, parts: Sequence[TensorPart], at: Coordinates) -> dict[str, Tensor]:
    """Return a copy of the values that a rank holds."""
    return {part.name: _cut(whole.get(part.name), part, getattr(at, part.among)) for part in parts}


def _cut(whole: Tensor | None, part: TensorPart, index: int) -> Tensor:
    own = torch.zeros(part.shape)
    if whole is None:
        return own
    if part.split is not None:
        width = part.shape[part.split]
        start = min(index * width, whole.shape[part.split])
        whole = whole.narrow(part.split, start, min(width, whole.shape[part.split] - start))
    own[_corner(whole.shape)] = whole
    return own


def _corner(shape: Shape) -> tuple[slice, ...]:
    """Return the index that selects a part of this shape from the beginning of a larger tensor."""
    return tuple(slice(size) for size in shape)


def join(
    held: Sequence[Tensors | None],
    parts: Sequence[Sequence[TensorPart]],
    parallelism: Parallelism,
    shapes: Mapping[str, Shape],
) -> dict[str, Tensor]:
    """Join the parts of all ranks to whole tensors of `shapes`.

    If several ranks hold a part, the first rank's copy is used.

    `held` and `parts` have one entry for each rank.
    """
    pieces: dict[str, list[Tensor]] = {}
    splits: dict[str, int | None] = {}
    for rank, (tensors, own) in enumerate(zip(held, parts, strict=True)):
        for part in own:
            splits[part.name] = part.split
            if _reports(part, parallelism, rank):
                assert tensors is not None, f"rank {rank} has {part.name} but reported nothing"
                pieces.setdefault(part.name, []).append(tensors[part.name])
    return {name: _join(pieces[name], splits[name], shape) for name, shape in shapes.items()}


def _reports(part: TensorPart, parallelism: Parallelism, rank: int) -> bool:
    if part.among == "expert":
        return parallelism.is_first_of_experts(rank)
    return parallelism.is_first_copy(rank) and (part.split is not None or parallelism.coordinates(rank).tensor == 0)


def _join(pieces: Sequence[Tensor], split: int | None, shape: Shape) -> Tensor:
    whole = pieces[0] if split is None else torch.cat(list(pieces), dim=split)
    return whole[_corner(shape)].clone()
