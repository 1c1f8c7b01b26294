"""Copies of the base model's embeddings that PEFT writes into the file of an adapter.

PEFT saves the output projection when an adapter is on it, and both embeddings when it is told to or takes the
vocabulary for resized. Copies add nothing; embeddings that differ from the base model's are no part of LoRA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith_trainer.engines.peft_layout import WEIGHTS_FILE
from tinsmith_trainer.errors import CheckpointInvalid
from tinsmith_trainer.torch_model.files.weight_files import ROWS_AT_ONCE, StoredTensor, pickled, stored_tensors

EMBEDDINGS_KEY = re.compile(
    r"base_model\.model\.(?:[\w.]{1,200}\.)?(?P<name>embed_tokens|lm_head)(?:\.base_layer)?\.weight"
)
STORED_NAME = re.compile(r"(?:.*\.)?(?P<name>embed_tokens|lm_head)\.weight")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""A model of bfloat16 may be loaded as float32, and one of float32 as bfloat16, before its weights are saved."""

Embeddings = Mapping[str, StoredTensor]
"""The base model's, by the last part of the module's name."""
NO_EMBEDDINGS: Embeddings = MappingProxyType({})


def stored_embeddings(directory: Path, config: Any) -> dict[str, StoredTensor]:
    """Return the base model's input embedding and output projection, without reading their values."""
    stored = stored_tensors(directory, config)
    return {match["name"]: tensor for name, tensor in stored.items() if (match := STORED_NAME.fullmatch(name))}


def check_copy(key: str, tensor: Tensor, embeddings: Embeddings) -> None:
    """Raise CheckpointInvalid unless the tensor repeats the base model's."""
    match = EMBEDDINGS_KEY.fullmatch(key)
    # A model of tied embeddings has one weight for both.
    stored = match and (embeddings.get(match["name"]) or embeddings.get("embed_tokens"))
    if stored and tensor.shape != stored.header.shape:
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE}: {key} has shape {list(tensor.shape)}, and the base model's has "
            f"{list(stored.header.shape)}. An adapter whose vocabulary was resized belongs to another base model: "
            "train it without resizing, or serve the resized model."
        )
    if not stored or not any(_equals(tensor, stored, dtype) for dtype in TYPES):
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE}: {key} differs from the base model's: the embedding was trained as a whole, and this "
            "server has LoRA alone. Save the adapter with `save_embedding_layers=False` if the embedding was not to "
            "change, or merge the adapter and serve that model."
        )


def _equals(tensor: Tensor, stored: StoredTensor, dtype: torch.dtype) -> bool:
    """Tell whether a tensor has the stored values, rounded to a type on their way."""
    starts = range(0, tensor.shape[0], ROWS_AT_ONCE)
    return all(
        torch.equal(tensor[start : start + ROWS_AT_ONCE], rows.to(dtype).to(tensor.dtype))
        for start, rows in zip(starts, _rows_of(stored, starts), strict=True)
    )


def _rows_of(stored: StoredTensor, starts: range) -> Iterator[Tensor]:
    if stored.file.suffix != ".safetensors":
        whole = pickled(stored.file)[stored.name]
        yield from (whole[start : start + starts.step] for start in starts)
        return
    with safe_open(str(stored.file), framework="pt") as opened:
        rows = opened.get_slice(stored.name)
        yield from (rows[start : start + starts.step] for start in starts)
