"""The PEFT engine as it computes on a GPU, on a CPU: rows instead of packed datums, whole products, no company."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import Call
from tinsmith_trainer.engines.peft import PeftEngineSettings, shared_forward
from tinsmith_trainer.engines.peft.engine import PeftEngine
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.worker.engine_factories import load_base_model
from typing_extensions import override


class LikeGpuEngine(PeftEngine):
    """What this cannot show is the device's own: copies, streams, kernels, and the rounding of its sums."""

    def __init__(self, torch_model: TorchModel, settings: PeftEngineSettings) -> None:
        super().__init__(torch_model, settings)
        self._is_invariant = self._packs = False

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        with mock.patch.object(shared_forward, "_product_tokens", return_value=None):
            super().advance(calls)


def build_like_gpu(dtype: torch.dtype, settings: PeftEngineSettings) -> LikeGpuEngine:
    return LikeGpuEngine(load_torch_model(str(tiny_directory()), dtype=dtype), settings)


def build_for_worker(options: WorkerOptions) -> tuple[LikeGpuEngine, None]:
    """Build what `tinsmith parity --engine support.engine.like_gpu:build_for_worker` compares."""
    settings = PeftEngineSettings(adapter_slots=options.adapter_slots, max_rank=options.max_rank)
    return LikeGpuEngine(load_base_model(options), settings), None
