"""Megatron and Ray are loaded by the nemo-rl engine alone: a PEFT worker's image does not have them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)
"""Each imports PyTorch in a Python of its own."""

BESIDE_THE_ENGINE = (
    "tinsmith_trainer.worker.main",
    "tinsmith_trainer.worker.startup",
    "tinsmith_trainer.worker.engine_factories",
    "tinsmith_trainer.cli",
    "tinsmith_trainer.engines.peft",
    "tinsmith_trainer.sampling.builtin",
)

PROGRAM = f"""
import importlib, sys
for name in ("megatron", "ray", "nemo_rl"):
    sys.modules[name] = None  # an import of it raises ImportError
for name in {BESIDE_THE_ENGINE!r}:
    importlib.import_module(name)
"""


@pytest.mark.slow("imports Megatron in a process of its own")
def test_a_worker_with_another_engine_starts_without_megatron_and_ray() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.slow("imports Megatron in a process of its own")
def test_a_rank_logs_no_warnings_about_missing_gpu_features() -> None:
    program = "import tinsmith_trainer.engines.megatron.local_rank"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
