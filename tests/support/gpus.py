"""What a GPU test needs of the machine, and engines on one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from support.engines import MAX_RANK, SLOTS, EngineFactory
from support.requirements import require
from support.tiny import tiny_directory
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model


def require_gpus(count: int = 1) -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(
        there >= count,
        f"PyTorch sees {there} GPUs of {count}: run on a machine with NVIDIA's driver and a PyTorch built for CUDA.",
    )


def require_package(name: str, cure: str) -> None:
    require(find_spec(name) is not None, f"The Python package {name} is not installed: {cure}")


@functools.cache
def _on_gpu(dtype: torch.dtype) -> TorchModel:
    return load_torch_model(str(tiny_directory()), dtype=dtype, device="cuda")


def _peft_engine(dtype: torch.dtype) -> Engine:
    """Skips the test where there is no GPU."""
    require_gpus()
    return build_peft_engine(_on_gpu(dtype), PeftEngineSettings(adapter_slots=SLOTS, max_rank=MAX_RANK))


# For the contract suite, beside `support.engines.ENGINES`.
GPU_ENGINES: Mapping[str, EngineFactory] = {
    "peft-gpu-float32": lambda: _peft_engine(torch.float32),
    "peft-gpu-bfloat16": lambda: _peft_engine(torch.bfloat16),
}
