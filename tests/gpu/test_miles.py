"""Miles' own Megatron actors, through the worker's factory. In an image of trainer_image/Dockerfile.miles."""

from __future__ import annotations

import pytest
from support.engine.contract import parity, require_gpus, require_package

# Kernels are compiled and servers start within a test; libraries warn about hardware that is not known here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

ATOL = 0.05


@pytest.fixture(autouse=True)
def _miles() -> None:
    require_package("miles", "the image of trainer_image/Dockerfile.miles has it.")


def compare_with_peft_on_the_cpu(flags: str) -> None:
    parity("peft:device=cpu", f"miles:{flags}", steps=6, atol=ATOL)


def test_one_gpu_of_miles_agrees_with_the_peft_engine_on_the_cpu() -> None:
    compare_with_peft_on_the_cpu("ranks=1,gpus-per-node=1")


@pytest.mark.parametrize("flags", ["tensor-parallel=2", "pipeline-parallel=2", "tensor-parallel=1"])
def test_two_gpus_of_miles_agree_with_the_peft_engine_on_the_cpu(flags: str) -> None:
    require_gpus(2)
    compare_with_peft_on_the_cpu(f"ranks=2,gpus-per-node=2,{flags}")


def test_the_same_steps_on_a_gpu_of_miles_are_the_same_bits() -> None:
    """A replay after a crash depends on it: no kernel may sum in another order each time."""
    parity("miles:ranks=1,gpus-per-node=1", "miles:ranks=1,gpus-per-node=1", steps=6, atol=0.0)
