"""The files from which transformers reads weights, and the names, shapes and types of the tensors in the files.

Only the headers of safetensors files are read, unless two tensors must be compared.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from tinsmith_trainer.errors import ModelDirectoryInvalid

CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The weight files that transformers looks for, in the order of the search."""
INDEX = ".index.json"
NAMED_WEIGHTS = "transformers_weights"
"""The key of config.json that names a file other than the candidates."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `header` is a tensor without memory, of the stored shape and type."""

    name: str
    file: Path
    header: Tensor


def weight_files(directory: Path, config: Any) -> list[Path]:
    """Return the files in which transformers looks for weights. Raises ModelDirectoryInvalid."""
    named = getattr(config, NAMED_WEIGHTS, None)
    found = [directory / name for name in ([named] if named else CANDIDATES) if (directory / name).is_file()]
    if not found:
        raise ModelDirectoryInvalid(
            f"{directory} has no weights under a name that transformers knows: expected {named or CANDIDATES[0]}, or "
            f"{CANDIDATES[1]} with the files that it names. Copy the model's files again."
        )
    return _shards(found[0]) if found[0].name.endswith(INDEX) else found[:1]


def _shards(index: Path) -> list[Path]:
    shards = sorted({index.parent / name for name in shard_of_each(index).values()})
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelDirectoryInvalid(
            f"{index} names files that are missing: {listed(missing)}. Copy the model's files again."
        )
    return shards


def shard_of_each(index: Path) -> Mapping[str, str]:
    """Return the file name of the shard for each tensor that an index lists. Raises ModelDirectoryInvalid."""
    try:
        found: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ModelDirectoryInvalid(f"{index} is not an index of weights: {type(error).__name__}: {error}.") from error
    return found


def stored_tensors(directory: Path, config: Any) -> dict[str, StoredTensor]:
    """Return the stored tensors by name. Raises ModelDirectoryInvalid if two tensors have one name."""
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(directory, config):
        headers = _safetensors_headers(file) if file.suffix == ".safetensors" else _pickled_headers(file)
        for name, header in headers.items():
            tensor = StoredTensor(name, file, header)
            if name in stored and not _is_copy(tensor, stored[name]):
                raise ModelDirectoryInvalid(
                    f"{stored[name].file} and {file.name} in the same directory both hold the tensor {name}, and "
                    "their contents differ. Copy the model's files again, into an empty directory."
                )
            stored[name] = tensor
    return stored


def _is_copy(one: StoredTensor, other: StoredTensor) -> bool:
    return one.header.dtype == other.header.dtype and have_equal_values(one, other)


def lost_tensors(directory: Path, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[str, str]]:
    """Return the tensors that an index lists but the shard lacks, each with the names of the shard and the index."""
    shards = {tensor.file for tensor in stored.values()}
    return {
        name: (shard, index.name)
        for index in (directory / candidate for candidate in CANDIDATES if candidate.endswith(INDEX))
        for name, shard in (shard_of_each(index) if index.is_file() else {}).items()
        if index.parent / shard in shards and name not in stored
    }


def have_equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two tensors, which may have different types, a few rows at a time."""
    if one.header.shape != other.header.shape:
        return False
    if one.file.suffix != ".safetensors":
        return torch.equal(pickled(one.file)[one.name], pickled(other.file)[other.name])
    with safe_open(str(one.file), framework="pt") as first, safe_open(str(other.file), framework="pt") as second:
        if one.header.dim() == 0:
            return torch.equal(first.get_tensor(one.name).float(), second.get_tensor(other.name).float())
        rows, more_rows = first.get_slice(one.name), second.get_slice(other.name)
        return all(
            torch.equal(_part(rows, start), _part(more_rows, start))
            for start in range(0, one.header.shape[0], ROWS_AT_ONCE)
        )


def _part(rows: Any, start: int) -> Tensor:
    found: Tensor = rows[start : start + ROWS_AT_ONCE]
    return found.float()


def _safetensors_headers(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  no mapping
            return {
                # Types without a name in transformers occur only in formats that are refused.
                name: torch.empty(
                    part.get_shape(), dtype=str_to_torch_dtype.get(part.get_dtype(), torch.uint8), device="meta"
                )
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ModelDirectoryInvalid(f"{file} is truncated or not a safetensors file: {error}.") from error


def _pickled_headers(file: Path) -> dict[str, Tensor]:
    try:
        found = pickled(file, device="meta")
    except Exception as error:  # pickle and torch raise many kinds of errors
        raise ModelDirectoryInvalid(
            f"{file} is not a weights file: {type(error).__name__}: {error}. Save the model again as safetensors."
        ) from error
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def pickled(file: Path, device: str = "cpu") -> dict[str, Any]:
    """Return the content of a file that torch saved.

    If the format allows partial reads, only the used parts are read.
    """
    found: dict[str, Any] = torch.load(file, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(file))
    return found


MOST_NAMED = 5


def listed(names: list[str]) -> str:
    """Return the first names of a list, and the number of further names."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
