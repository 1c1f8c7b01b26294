"""Conversion of experts' adapters from the layouts of other programs: the inverse of `engines/peft_layout.py`.

PEFT stores two pairs of matrices for all experts of a layer, and inference servers store one pair for each expert.
Tinsmith's tensors have three dimensions, and all experts of a layer share the factor at the model's hidden size. An
adapter is refused if the experts of a layer do not share the factor at the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.peft_layout import DOWN, GATE, GATED_NAMES, UNGATED_NAMES, UP

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]

FUSED = re.compile(r"(?P<experts>.*\.experts)(?P<inner>\.base_layer)?\.lora_(?P<letter>[AB])")
EACH = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d{1,5})\.(?P<part>\w+)\.lora_(?P<letter>[AB])")


class NotShared(ValueError):
    """An error for experts with separate factors, where a shared factor is required."""


def to_tinker_experts(tensors: Tensors, rank: int) -> dict[str, Array]:
    """Convert other layouts to `<experts>.w1|w2|w3.lora_A|B` of three dimensions.

    Other tensors are returned unchanged. Raises ValueError with the cause.
    """
    found = {name: tensor for name, tensor in tensors.items() if not FUSED.fullmatch(name) and not EACH.fullmatch(name)}
    for experts in sorted({match["experts"] for name in tensors if (match := FUSED.fullmatch(name))}):
        found |= _from_fused(tensors, experts, rank)
    one_by_one: dict[str, list[re.Match[str]]] = {}
    for name in tensors:
        if match := EACH.fullmatch(name):
            one_by_one.setdefault(match["experts"], []).append(match)
    for experts, matches in sorted(one_by_one.items()):
        found |= _from_each(tensors, experts, matches)
    return found


def fit_shape(tensor: Array, shape: tuple[int, ...]) -> Array:
    """Convert a factor to `shape`, which has one factor for all experts or one factor for each expert.

    Raises NotShared, or ValueError for another shape.
    """
    if tensor.shape == shape:
        return tensor
    if tensor.ndim != 3 or tensor.shape[1:] != shape[1:]:
        raise ValueError("another shape")
    if len(tensor) == 1:
        return np.broadcast_to(tensor, shape)
    if shape[0] != 1:
        raise ValueError("another number of experts")
    if (tensor != tensor[:1]).any():
        raise NotShared
    return tensor[:1]


def _from_fused(tensors: Tensors, experts: str, rank: int) -> dict[str, Array]:
    """Convert PEFT's A `[experts * rank, d_in]` and B `[d_out, rank * experts]`.

    The pair for gate and up has twice the rank.
    """
    inner = _pair(tensors, f"{experts}.base_layer")
    outer = _pair(tensors, experts)
    # The outer adapter always has the experts' own rank, which gives their number.
    count, rest = divmod(len(outer[0]), rank)
    if rest or not count or any(side % count for side in (len(inner[0]), inner[1].shape[1], outer[1].shape[1])):
        raise ValueError(f"{experts} has {len(outer[0])} rows, which do not divide into experts of rank {rank}")
    parts = {DOWN: _apart(*outer, count)}
    up_A, up_B = _apart(*inner, count)
    if up_A.shape[1] == rank:
        parts[GATE] = up_A, up_B
    else:
        parts[GATE], parts[UP] = _gate_and_up(experts, up_A, up_B, rank)
    factors = ((part, *both) for part, pair in parts.items() for both in zip("AB", pair, strict=True))
    return {f"{experts}.{part}.lora_{letter}": factor for part, letter, factor in factors}


def _pair(tensors: Tensors, module: str) -> tuple[Array, Array]:
    try:
        pair = tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]
    except KeyError as missing:
        raise ValueError(f"{missing.args[0]} is missing: adapters of experts have both parameters") from None
    if any(tensor.ndim != 2 for tensor in pair):
        raise ValueError(f"the factors of {module} must have two dimensions")
    return pair


def _apart(lora_A: Array, lora_B: Array, count: int) -> tuple[Array, Array]:
    """Split by expert: return A `[experts, rank, d_in]` and B `[experts, d_out, rank]`."""
    return lora_A.reshape(count, -1, lora_A.shape[1]), lora_B.reshape(len(lora_B), -1, count).transpose(2, 0, 1)


def _gate_and_up(
    experts: str, lora_A: Array, lora_B: Array, rank: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Split gate and up, which are concatenated or interleaved.

    Half of the rank and half of the rows belong to gate, and the rest belongs to up.
    """
    rows = lora_B.shape[1]
    if lora_A.shape[1] != 2 * rank or lora_B.shape[2] != 2 * rank or rows % 2:
        raise ValueError(
            f"{experts}.gate_up_proj has an adapter of rank {lora_A.shape[1]}: gate and up must have rank {rank} each"
        )
    for of_gate, of_up in (
        (slice(rows // 2), slice(rows // 2, None)),
        (slice(0, None, 2), slice(1, None, 2)),
    ):
        if not lora_B[:, of_gate, rank:].any() and not lora_B[:, of_up, :rank].any():
            gate = lora_A[:, :rank], lora_B[:, of_gate, :rank]
            return gate, (lora_A[:, rank:], lora_B[:, of_up, rank:])
    raise ValueError(f"{experts}.gate_up_proj has an adapter that mixes gate and up; this server needs one for each")


def _from_each(tensors: Tensors, experts: str, matches: Sequence[re.Match[str]]) -> dict[str, Array]:
    """Convert the layout with one pair of matrices for each expert and projection."""
    parts = {match["part"] for match in matches}
    names = GATED_NAMES if GATED_NAMES[GATE] in parts else UNGATED_NAMES
    of_part = {name: part for part, name in names.items()}
    if unknown := parts - of_part.keys():
        raise ValueError(f"{experts} has an unknown projection {min(unknown)}; known are {', '.join(of_part)}")
    count = 1 + max(int(match["number"]) for match in matches)
    if count > len(matches):
        raise ValueError(f"{experts} has an expert {count - 1}, but lacks lower ones")
    found: dict[str, Array] = {}
    for name, part in of_part.items():
        for letter in "AB":
            one_by_one = [tensors.get(f"{experts}.{number}.{name}.lora_{letter}") for number in range(count)]
            present = [tensor for tensor in one_by_one if tensor is not None]
            if len(present) != count or len({tensor.shape for tensor in present}) != 1:
                raise ValueError(f"{experts} lacks {name}.lora_{letter} for an expert, or has it in different shapes")
            found[f"{experts}.{part}.lora_{letter}"] = np.stack(present)
    return found
