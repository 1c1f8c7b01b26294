"""The PEFT engine on one GPU, compared with itself on the CPU and with a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engine.contract import forward, parity, train
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import AdamParams, Datum, LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.torch_model.loading import load_torch_model

# Kernels are compiled and servers start within a test; libraries warn about hardware that is not known here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

# The same comparison on a CPU, of bfloat16 with float32, stays below half of it.
BFLOAT16_ATOL = 0.02
FLOAT32_ATOL = 1e-3

LORA = LoraSpec(rank=32, alpha=32.0, seed=1)


def test_in_float32_it_agrees_with_the_cpu_in_every_loss() -> None:
    parity("peft:device=cpu", "peft:device=cuda,dtype=float32", steps=6, atol=FLOAT32_ATOL)


def test_the_engine_agrees_with_the_cpu_within_the_rounding_of_bfloat16() -> None:
    parity("peft:device=cpu", "peft:device=cuda,dtype=bfloat16", steps=6, atol=BFLOAT16_ATOL)


def test_in_bfloat16_it_agrees_with_a_plain_peft_loop_on_the_same_gpu() -> None:
    parity("peft:device=cuda", "peft-reference:device=cuda", steps=6, atol=BFLOAT16_ATOL)


def test_an_adapter_trained_on_it_continues_on_the_cpu() -> None:
    directory = str(tiny_directory())
    datums = [Datum(np.arange(3, 40, dtype=np.int32), {"target_tokens": np.arange(4, 41, dtype=np.int64)})]
    on_gpu = build_peft_engine(load_torch_model(directory, dtype=torch.bfloat16, device="cuda"))
    on_gpu.create_adapter("a", LORA)
    train(on_gpu, datums, steps=3)

    on_cpu = build_peft_engine(load_torch_model(directory))
    on_cpu.load_state("a", on_gpu.state("a"), with_optimizer=True)

    expected = forward(on_gpu, datums).outputs[0]["logprobs"]
    np.testing.assert_allclose(forward(on_cpu, datums).outputs[0]["logprobs"], expected, atol=BFLOAT16_ATOL)
    assert on_cpu.optim_step("a", AdamParams(1e-3))["step"] == 4
