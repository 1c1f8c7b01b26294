"""NeMo RL's own Megatron workers, through the worker's factory. In an image of trainer_image/Dockerfile.nemo-rl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine.contract import parity, require_gpus, require_package
from support.tiny_models import tiny_directory

# Kernels are compiled and servers start within a test; libraries warn about hardware that is not known here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

ATOL = 0.05


@pytest.fixture(autouse=True)
def _nemo_rl() -> None:
    require_package("nemo_rl", "the image of trainer_image/Dockerfile.nemo-rl has it.")


def compare_with_peft_on_the_cpu(flags: str) -> None:
    parity("peft:device=cpu", f"nemo-rl:{flags}", steps=6, atol=ATOL)


def test_a_model_is_converted_where_no_gpu_is_seen(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tinsmith_trainer.conversion", f"--model={tiny_directory()}", "--gpus-per-node=1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NRL_MEGATRON_CHECKPOINT_DIR": str(tmp_path)},
        check=True,
    )
    [run_config] = tmp_path.glob("*/iter_0000000/run_config.yaml")
    assert "use_cpu_initialization: false" in run_config.read_text()


def test_one_gpu_agrees_with_the_peft_engine_on_the_cpu() -> None:
    compare_with_peft_on_the_cpu("ranks=1,gpus-per-node=1")


@pytest.mark.parametrize(
    "flags", ["tensor-parallel=2", "pipeline-parallel=2", "context-parallel=2", "tensor-parallel=1"]
)
def test_two_gpus_agree_with_the_peft_engine_on_the_cpu(flags: str) -> None:
    require_gpus(2)
    compare_with_peft_on_the_cpu(f"ranks=2,gpus-per-node=2,{flags}")


def test_two_gpus_agree_with_one_with_the_optimizer_distributed() -> None:
    require_gpus(2)
    distributed = "nemo-rl:ranks=2,gpus-per-node=2,distributed-optimizer=true"
    parity("nemo-rl:ranks=1,gpus-per-node=1", distributed, steps=6, atol=ATOL)
