"""Tiny base models, made once a run and loaded once."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from support.temporary_files import folder_of_whole_run
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.tiny_model import Family, TinyShape, make_tiny_model

SMALL = TinyShape(max_sequence_length=512)
TIED = TinyShape(max_sequence_length=512, tied_embeddings=True)
FEW_EXPERTS = TinyShape(max_sequence_length=512, layers=1, experts=4)
"""A small mixture: a larger one takes several times as long as a dense model."""
LONG = TinyShape(hidden_size=128, heads=2, kv_heads=1, max_sequence_length=1024)
"""Heads of 64, a size that the attention kernels of GPUs are made for."""


def tiny_directory(family: Family = "qwen3", shape: TinyShape = SMALL) -> Path:
    """Return a model directory, which is removed when the tests end."""
    return _new_model(family, shape)


def tiny_model(family: Family = "qwen3", shape: TinyShape = SMALL, dtype: torch.dtype = torch.float32) -> TorchModel:
    return _loaded(family, shape, dtype)


# Cached with all arguments given: a cache takes a default and the same value spelled out for two keys.
@functools.cache
def _new_model(family: Family, shape: TinyShape) -> Path:
    return make_tiny_model(folder_of_whole_run("tiny-model-"), family=family, shape=shape)


@functools.cache
def _loaded(family: Family, shape: TinyShape, dtype: torch.dtype) -> TorchModel:
    return load_torch_model(str(_new_model(family, shape)), dtype=dtype)
