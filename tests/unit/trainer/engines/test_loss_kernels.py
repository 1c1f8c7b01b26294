"""Liger's kernel makes the logprobs that PyTorch's operations make, and is taken where it can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.engine.liger_on_cpu import CASES
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.engines.peft.logprobs import choose_loss_kernel
from tinsmith_trainer.errors import ServerError

TESTS = Path(__file__).parents[3]
ON_A_GPU = (torch.device("cuda"), torch.bfloat16)


@pytest.mark.slow("runs a GPU's kernel in Triton's interpreter")
def test_ligers_kernel_makes_the_logprobs_and_gradients_of_a_log_softmax() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "default"}
    program = [sys.executable, "-m", "support.engine.liger_on_cpu"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [*CASES, "in chunks", "the trial"], done.stderr


def test_the_kernel_is_neither_chosen_nor_allowed_on_the_cpu() -> None:
    assert choose_loss_kernel("auto", torch.device("cpu"), torch.float32) == "torch"
    with pytest.raises(ServerError, match="--loss-kernel liger: it requires a GPU, and this worker uses the CPU"):
        build_peft_engine(tiny_model(), PeftEngineSettings(loss_kernel="liger"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="This machine has a GPU, on which the trial succeeds.")
def test_a_kernel_with_a_failed_trial_is_refused_with_the_reason() -> None:
    assert choose_loss_kernel("auto", *ON_A_GPU) == "torch"
    with pytest.raises(ServerError, match=r"Liger's kernel does not run on this GPU: .*(CUDA|NVIDIA)"):
        choose_loss_kernel("liger", *ON_A_GPU)


def test_pytorchs_operations_need_no_trial() -> None:
    assert choose_loss_kernel("torch", *ON_A_GPU) == "torch"
