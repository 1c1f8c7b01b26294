"""An adapter's whole tensors, and the parts of them that ranks hold. Pure.

Parts are padded to the greatest rank that an adapter may have: A `[max_rank, d_in]`, B `[d_out, max_rank]`. What a
part has beyond the adapter's rank, or beyond the end of a dimension that tensor ranks divide, is zero. So is
all of a module that the adapter does not train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_trainer.engines.nemo_rl.parallelism import Parallelism

Shape = tuple[int, int]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One rank's part of `<module>.lora_A` or `<module>.lora_B`: its own shape, padding included.

    `split` is the dimension that tensor ranks divide in equal parts; None: each holds all of it. `whole_shape` is the
    model's, with the greatest rank; the parts may be more together.
    """

    name: str
    shape: Shape
    split: int | None
    whole_shape: Shape


def whole_shapes(parts: Sequence[Sequence[TensorPart]], modules: Sequence[str], rank: int) -> dict[str, Shape]:
    """Of an adapter of this rank on these modules: modules in their order, A before B. `parts` are every rank's."""
    padded = {part.name: part.whole_shape for held in parts for part in held}
    shapes: dict[str, Shape] = {}
    for module in modules:
        shapes[f"{module}.lora_A"] = (rank, padded[f"{module}.lora_A"][1])
        shapes[f"{module}.lora_B"] = (padded[f"{module}.lora_B"][0], rank)
    return shapes


def cut(whole: Tensors, parts: Sequence[TensorPart], tensor_rank: int) -> dict[str, Tensor]:
    """A rank's own copy of its parts."""
    return {part.name: _cut(whole.get(part.name), part, tensor_rank) for part in parts}


def _cut(whole: Tensor | None, part: TensorPart, tensor_rank: int) -> Tensor:
    mine = torch.zeros(part.shape)
    if whole is None:
        return mine
    if part.split is not None:
        width = part.shape[part.split]
        start = min(tensor_rank * width, whole.shape[part.split])
        whole = whole.narrow(part.split, start, min(width, whole.shape[part.split] - start))
    mine[: whole.shape[0], : whole.shape[1]] = whole
    return mine


def join(
    held: Sequence[Tensors | None],
    parts: Sequence[Sequence[TensorPart]],
    parallelism: Parallelism,
    shapes: Mapping[str, Shape],
) -> dict[str, Tensor]:
    """The whole tensors of `shapes`, from what ranks of data index 0 hold. `held` and `parts` are by rank."""
    pieces: dict[str, list[Tensor]] = {}
    splits: dict[str, int | None] = {}
    for rank, (tensors, own) in enumerate(zip(held, parts, strict=True)):
        at = parallelism.coordinates(rank)
        if at.data or at.context:
            continue
        assert tensors is not None, f"rank {rank} has data index 0 and told nothing"
        for part in own:
            splits[part.name] = part.split
            if part.split is not None or at.tensor == 0:
                pieces.setdefault(part.name, []).append(tensors[part.name])
    return {name: _join(pieces[name], splits[name], shape) for name, shape in shapes.items()}


def _join(pieces: Sequence[Tensor], split: int | None, shape: Shape) -> Tensor:
    whole = pieces[0] if split is None else torch.cat(list(pieces), dim=split)
    return whole[: shape[0], : shape[1]].clone()
