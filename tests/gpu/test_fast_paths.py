"""The fast paths of a GPU are taken: each falls back with a warning, and tests of results cannot tell."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.sampler.jobs import ask_all, job, prompt_of, random_adapter
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.engines.peft.settings import device_settings
from tinsmith_trainer.sampling.builtin import BuiltinSampler, sampler_settings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.model_cache.choice import choose_forward
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model

# Kernels are compiled within a test; libraries warn about hardware that is not known here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

ROUNDS = 6
LENGTHS = (3, 17, 64, 200)


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load_torch_model(str(tiny_directory()), dtype=torch.bfloat16, device="cuda")


def test_steps_stay_recorded_while_adapters_come_and_go_in_another_thread(model: TorchModel) -> None:
    forward = choose_forward(model)
    assert isinstance(forward, ForwardPass)
    sampler = BuiltinSampler(model, sampler_settings("cuda", "bfloat16"), forward)
    for number in range(3):
        sampler.load_adapter(f"kept-{number}", random_adapter(model, seed=number))
    for number in range(ROUNDS):
        loads = threading.Thread(target=load_and_drop, args=(sampler, model, number))
        loads.start()
        ask_all(sampler, [job(prompt_of(20, seed=n), adapter=f"kept-{n % 3}", max_tokens=30 + n) for n in range(6)])
        loads.join()
    sampler.close()
    assert forward.recorder is not None
    assert forward.recorder.is_on


def load_and_drop(sampler: BuiltinSampler, model: TorchModel, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        sampler.load_adapter(f"passing-{seed}", random_adapter(model, seed=seed))
        sampler.drop_adapter(f"passing-{seed}")


def test_datums_of_several_adapters_and_lengths_share_one_packed_forward(model: TorchModel) -> None:
    engine = build_peft_engine(model, device_settings("cuda", torch.bfloat16))
    for adapter in "ab":
        engine.create_adapter(adapter, LoraSpec(rank=8, alpha=8.0, seed=1))
    calls = [engine.start(Work(adapter, datums(LENGTHS), LossSpec("cross_entropy"))) for adapter in "ab"]
    engine.advance(engine.cobatch(calls))
    assert [call.next_tokens for call in calls] == [0, 0]


def datums(lengths: Sequence[int]) -> list[Datum]:
    tokens = [np.arange(3, 3 + length) for length in lengths]
    return [Datum(own.astype(np.int32), {"target_tokens": own.astype(np.int64)}) for own in tokens]
