"""The places where the PEFT engine computes in tests: a CPU, a GPU, and a CPU by the path of a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.engine.like_gpu import LikeGpuEngine
from support.requirements import require
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model

Place = Literal["cpu", "like-gpu", "gpu"]

in_place_of_a_gpu = pytest.mark.parametrize("place", ["like-gpu", pytest.param("gpu", marks=pytest.mark.gpu)])
"""The same test on a GPU's path and on a GPU."""


def require_gpus(count: int = 1) -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(
        there >= count,
        f"PyTorch sees {there} GPUs of {count}: run on a machine with NVIDIA's driver and a PyTorch built for CUDA.",
    )


def model_on(place: Place, directory: Path, dtype: torch.dtype = torch.float32) -> TorchModel:
    """Return the model, which is loaded once. Skips the test where it needs a GPU and there is none."""
    if place == "gpu":
        require_gpus()
    return _loaded(place, directory, dtype)


@functools.cache
def _loaded(place: Place, directory: Path, dtype: torch.dtype) -> TorchModel:
    """Load one model for each place: an engine like a GPU's changes the norms of its model."""
    return load_torch_model(str(directory), dtype=dtype, device="cuda" if place == "gpu" else "cpu")


def peft_engine(
    place: Place, directory: Path, settings: PeftEngineSettings, dtype: torch.dtype = torch.float32
) -> PeftEngine:
    """Skips the test where it asks for a GPU and there is none."""
    model = model_on(place, directory, dtype)
    if place == "like-gpu":
        return LikeGpuEngine(model, settings)
    return build_peft_engine(model, replace(settings, numerics="exact" if place == "cpu" else "fast"))
