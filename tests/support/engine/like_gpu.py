"""The PEFT engine and the built-in sampler as they compute on a GPU, on a CPU.

The engine has `numerics: fast`, one grouped product for all experts and all adapters, and fused norms. The
sampler records its steps and reads a step behind the next one. A recorded step is computed again with the recorded
inputs. What this cannot show is the device's own: copies, streams, kernels, recordings of kernels, and the rounding of
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest import mock

from tinsmith_trainer.engines.base import Call
from tinsmith_trainer.engines.peft import PeftEngineSettings
from tinsmith_trainer.engines.peft.engine import PeftEngine
from tinsmith_trainer.engines.peft.settings import device_settings
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.builtin import forward
from tinsmith_trainer.sampling.builtin.batch import BatchPlan
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.steps.recorded import StepRecorder
from tinsmith_trainer.torch_model import expert_products
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.norms import fuse_norms
from tinsmith_trainer.worker.engine_factories import load_base_model
from torch import Tensor
from typing_extensions import override


class LikeGpuEngine(PeftEngine):
    """A PEFT engine that takes a GPU's path on a CPU."""

    def __init__(self, torch_model: TorchModel, settings: PeftEngineSettings) -> None:
        super().__init__(torch_model, replace(settings, numerics="fast"))
        fuse_norms(torch_model.model)

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        with grouped_experts():
            super().advance(calls)


def build_for_worker(options: WorkerOptions) -> tuple[LikeGpuEngine, None]:
    """Build what `tinsmith parity --engine support.engine.like_gpu:build_for_worker` compares."""
    model = load_base_model(options)
    settings = device_settings("cuda", model.model.dtype)
    return LikeGpuEngine(model, replace(settings, adapter_slots=options.adapter_slots, max_rank=options.max_rank)), None


@contextmanager
def sampling_like_gpu() -> Iterator[None]:
    """Have samplers that are made in the block take the path of a GPU, for as long as it lasts."""
    with (
        mock.patch.object(forward, "recorder_for", new=_recorder),
        mock.patch.object(BatchPlan, "reads_behind", new=True),
        mock.patch.object(ForwardPass, "shares_prefixes", new=_never),
        grouped_experts(),
    ):
        yield


class Repeated:
    """A recording that computes the step again from the recorded inputs, as a CUDA graph launches its kernels again."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.output = compute().clone()

    def replay(self) -> None:
        self.output.copy_(self._compute())


def _recorder(_device: object) -> StepRecorder:
    return StepRecorder(Repeated, lambda: None)


def grouped_experts() -> AbstractContextManager[object]:
    """Have one grouped product serve all experts, for as long as a block lasts, where PyTorch has such a product."""
    return mock.patch.object(expert_products, "takes_all_at_once", new=_where_there_is_one)


def _where_there_is_one(*_: object) -> bool:
    return expert_products.HAS_GROUPED_PRODUCTS


def _never(*_: object) -> bool:
    return False
